"""What a plan is asked: every point of the choice space, for one model on one kind of hardware. Importable without torch.

    plan file (YAML)       model, hardware and choices; published cases live in recipes/plans/
    plan_request(config)   today's campaign configuration as choices
    PlanRequest            card + hardware + choices: the planner's only input

The choice space is DESIGN's: what trains x update rule x where weights live x schedule x reference x sampler, and the sizes.
A plan may ask for points that the trainer cannot run yet; a combination that makes no sense is refused with what to set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from trainer.config.load import lay_over, read_yaml, validate_as
from trainer.config.schema import Section, refuse
from trainer.errors import ConfigError, nearest
from trainer.files import place_of
from trainer.plan.card import ModelCard
from trainer.plan.hardware import Hardware, load_hardware

if TYPE_CHECKING:
    from trainer.config import CampaignConfig

Count = Annotated[int, Field(ge=1)]
Size = Annotated[float, Field(gt=0)]
Dtype = Literal["float32", "bfloat16", "fp8", "int8", "int4"]
BYTES: dict[str, float] = {"float32": 4.0, "bfloat16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}


class LoraChoice(Section):
    rank: Count = 32
    target_modules: tuple[str, ...] = ("q_proj", "v_proj", "o_proj", "gate_proj")
    parameters: Size | None = None
    """The adapter's parameters where they are stated; None counts them on the card."""


class TrainChoice(Section):
    method: Literal["full", "lora"] = "full"
    rule: Literal["adamw", "sgd", "stateless"] = "adamw"
    """`sgd` keeps gradients and a float32 master; `stateless` updates each layer in backward and keeps nothing."""
    dtype: Dtype = "bfloat16"
    """Type of the stored weights; for LoRA, of the frozen backbone, which may be int8 or int4."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Type of activations; None: bfloat16, or float32 where the weights are."""
    gradient_dtype: Literal["float32", "bfloat16"] | None = None
    """None: that of the weights that train."""
    master: bool | None = None
    """A float32 copy that the optimizer steps; None: for adamw and sgd on bfloat16 weights."""
    residency: Literal["resident", "tiered", "sharded", "zero3"] = "resident"
    cold: Literal["host", "disk"] = "host"
    """Where a tiered model's weights lie."""
    resident_layers: Annotated[int, Field(ge=0)] = 0
    """Layers of a tiered model that never leave the device."""
    slots: Annotated[int, Field(ge=1)] = 2
    """Layers that are on the device at once while weights are streamed or gathered; 1 means no prefetch."""
    split: bool = False
    """Stateless: bfloat16 weights have 16 more bits that only the update reads."""
    expert_parallel: Count = 1
    """Devices over which a layer's experts are spread: tokens travel to them instead of their weights."""
    layer_major: bool = False
    """All micro-batches of one layer, then the next layer: weights travel twice a step."""
    recompute: bool = True
    """Activations of a layer are made again in backward."""
    boundary: Literal["device", "host"] = "device"
    """Where the activations between layers wait for backward."""
    head_chunk_tokens: Count | None = 1024
    """Tokens whose logits exist at a time; None: those of the whole micro-batch."""
    optimizer_offload: Literal["none", "host", "disk"] = "none"
    lora: LoraChoice = LoraChoice()

    @model_validator(mode="after")
    def _check(self) -> TrainChoice:
        if self.method == "full" and self.dtype in ("int8", "int4", "fp8"):
            refuse(
                "dtype",
                self.dtype,
                "weights that train need bfloat16 or float32; quantise a frozen backbone (method: lora) instead",
            )
        if self.method == "lora" and self.rule == "stateless":
            refuse("rule", self.rule, "an adapter's optimizer state is small; set rule: adamw")
        if self.rule == "stateless" and self.optimizer_offload != "none":
            refuse("optimizer_offload", self.optimizer_offload, "a stateless rule has no state to offload; set none")
        if self.rule == "stateless" and self.master:
            refuse("master", True, "a stateless rule keeps no float32 master; set false")
        if self.layer_major and self.residency == "zero3":
            refuse("layer_major", True, "zero3 follows autograd's own order; set residency: sharded")
        return self


class SampleChoice(Section):
    engine: Literal["embedded", "vllm"] = "embedded"
    """`embedded` samples with the learner's own weights; `vllm` keeps its own copy."""
    processes: Annotated[int, Field(ge=0)] = 0
    """Embedded samplers in processes of their own beside the learner, each with its own copy of the weights."""
    dtype: Dtype | None = None
    """Type of the engine's weights; None: the learner's. An embedded sampler always has the learner's."""
    kv_bits: Literal[8, 16, 32] | None = None
    """Bits of a cached element; None: those of activations."""
    page_tokens: Count = 16
    sequences: Count = 256
    """Completions decoded at the same time, over the whole pool."""
    devices: Annotated[int, Field(ge=0)] = 0
    """Devices of a sampling pool of its own; 0 samples on the training devices."""
    tensor_parallel: Count | None = None
    """Devices that share one copy of the engine's weights; None: as few as they fit in."""
    sleeps: bool = False
    """Whether an engine on the training devices frees its weights and cache while the learner works."""
    kv_host_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the KV cache whose cold pages lie in host memory."""
    sync: Literal["adapter", "merge", "weights"] | None = None
    """What an engine is given; None: the adapter for LoRA, the weights otherwise."""
    sync_every: Count = 1
    """Optimizer steps between two hand-overs."""

    @model_validator(mode="after")
    def _check(self) -> SampleChoice:
        if self.engine == "embedded" and self.devices:
            refuse("devices", self.devices, "the embedded sampler lives with the learner; set 0, or engine: vllm")
        if self.engine == "embedded" and self.dtype is not None:
            refuse("dtype", self.dtype, "the embedded sampler uses the learner's weights; leave it out, or set engine: vllm")
        return self


class ReferenceChoice(Section):
    kind: Literal["none", "adapter_off", "resident", "int8_streamed", "engine", "anchors"] = "none"
    dtype: Dtype | None = None
    """None: int8 where streamed, else that of the trained weights."""


class RewardChoice(Section):
    parameters: Annotated[float, Field(ge=0)] = 0
    """Of a reward model; 0: verifiers only."""
    dtype: Dtype = "bfloat16"
    place: Literal["device", "host", "elsewhere"] = "device"


class BatchChoice(Section):
    prompts_per_step: Count = 64
    group_size: Count = 8
    prompt_tokens: Size = 256
    """Mean length."""
    completion_tokens: Size = 512
    """Mean length."""
    max_prompt_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    """The common cap; None: twice the mean."""
    micro_batch_tokens: Count = 4096
    """Padded tokens of one forward pass on one device."""
    passes: Count = 1
    minibatches: Count = 1
    """Optimizer steps a pass."""
    tokens_per_step: Size | None = None
    """As published; None: prompts x group x mean lengths."""
    accumulation: Count | None = None
    """As published: micro-batches a step; checked against the other two."""

    @property
    def samples(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def trained_tokens(self) -> float:
        """Tokens fed to the learner in one pass over a step's samples."""
        return self.tokens_per_step or self.samples * (self.prompt_tokens + self.completion_tokens)

    @property
    def longest(self) -> int:
        prompt = self.max_prompt_tokens or int(self.prompt_tokens)
        return prompt + (self.max_completion_tokens or int(2 * self.completion_tokens))


class ScheduleChoice(Section):
    kind: Literal["sync", "colocated", "async"] = "sync"
    steps: Count = 200
    max_lag: Count = 32
    pool_samples: Count = 4096
    anchors_every: Count = 200


class Choices(Section):
    """Every choice of a plan but the model and the kind of hardware."""

    devices: Count = 1
    """Training devices."""
    train: TrainChoice = TrainChoice()
    sample: SampleChoice = SampleChoice()
    reference: ReferenceChoice = ReferenceChoice()
    reward: RewardChoice = RewardChoice()
    batch: BatchChoice = BatchChoice()
    schedule: ScheduleChoice = ScheduleChoice()

    @model_validator(mode="after")
    def _check(self) -> Choices:
        train, sample = self.train, self.sample
        if self.reference.kind == "adapter_off" and train.method == "full":
            refuse(
                "reference.kind",
                "adapter_off",
                "every weight trains, so nothing can be switched off; set int8_streamed or anchors",
            )
        if train.residency in ("sharded", "zero3") and self.devices == 1:
            refuse(
                "train.residency",
                train.residency,
                "one device has nobody to share with; set resident or tiered, or raise devices",
            )
        if self.devices % train.expert_parallel:
            refuse("train.expert_parallel", train.expert_parallel, f"must divide the {self.devices} training devices")
        if train.expert_parallel > 1 and train.residency not in ("sharded", "zero3"):
            refuse(
                "train.expert_parallel",
                train.expert_parallel,
                "is for weights that devices share; set train.residency: sharded or zero3",
            )
        if self.schedule.kind == "async" and sample.engine == "embedded" and not sample.processes:
            refuse(
                "schedule.kind",
                "async",
                "an asynchronous sampler is a process of its own; set sample.engine: vllm and sample.devices",
            )
        if self.schedule.kind == "colocated" and sample.devices:
            refuse("schedule.kind", "colocated", "means one pool of devices; set sample.devices: 0")
        if self.reference.kind == "engine" and sample.engine != "vllm":
            refuse("reference.kind", "engine", "needs an engine of its own; set sample.engine: vllm, or reference int8_streamed")
        return self


class PlanFile(Section):
    """A plan as a person writes it."""

    name: str = "plan"
    note: str = ""
    model: str | dict[str, Any]
    hardware: str | dict[str, Any] = "h100-80gb"
    choices: Choices = Choices()


@dataclass(frozen=True)
class PlanRequest:
    name: str
    card: ModelCard
    hardware: Hardware
    choices: Choices
    adapter_parameters: int = 0  # of the LoRA adapter; 0 for full
    note: str = ""

    def change(self, **values: object) -> PlanRequest:
        """Return the request with some choices changed; keys are dotted with `__`, as in train__recompute=True."""
        choices = self.choices
        for key, value in values.items():
            choices = _set(choices, key.split("__"), value)
        return replace(self, choices=choices)

    def valid(self) -> bool:
        """Whether the choices go together."""
        try:
            Choices.model_validate_json(self.choices.model_dump_json())
        except ValueError:
            return False
        return True


def _set(node: Any, path: list[str], value: object) -> Any:
    if len(path) == 1:
        return node.model_copy(update={path[0]: value})
    inner = _set(getattr(node, path[0]), path[1:], value)
    return node.model_copy(update={path[0]: inner})


def count_adapter(card: ModelCard, train: TrainChoice) -> int:
    """Return the parameters of the adapter that trains, 0 where every weight does."""
    if train.method == "full":
        return 0
    if train.lora.parameters is not None:
        return round(train.lora.parameters)
    from trainer.plan.skeleton import lora_parameters

    return lora_parameters(card, train.lora.rank, train.lora.target_modules)


def make_request(name: str, card: ModelCard, hardware: Hardware, choices: Choices, note: str = "") -> PlanRequest:
    return PlanRequest(name, card, hardware, choices, count_adapter(card, choices.train), note)


# -- from plan files ------------------------------------------------------------


def read_plan(path: Path, overrides: Mapping[str, Any] | None = None) -> PlanFile:
    """Return a plan file, with overrides (a tree like the file's) laid over it."""
    tree = lay_over(read_yaml(path), dict(overrides or {}))
    tree.setdefault("name", path.stem)
    return validate_as(PlanFile, tree, "plan")


def is_plan(tree: Mapping[str, Any]) -> bool:
    """Whether a YAML tree is a plan file rather than a campaign's recipe."""
    return "model" in tree and "campaign" not in tree


def request_of(plan: PlanFile) -> PlanRequest:
    """Return the request of a plan file: its model's card and its hardware's description are loaded."""
    from trainer.plan.skeleton import load_card

    return make_request(plan.name, load_card(plan.model), load_hardware(plan.hardware), plan.choices, plan.note)


# -- from a campaign's configuration ------------------------------------------------------------


def choices_of(
    config: CampaignConfig,
    prompt_tokens: float | None = None,
    completion_tokens: float | None = None,
    longest_prompt: float | None = None,
) -> Choices:
    """Map a campaign's configuration to choices.

    Args:
        config: the resolved configuration.
        prompt_tokens: mean length of prompts where it is known (prepared prompts, a finished run); None: the cap.
        completion_tokens: mean length of completions where it is known; None: the cap.
        longest_prompt: where it is known; None: the cap.
    """
    train, kl = config.train, config.train.algorithm.kl
    cap = max([stage.max_completion_tokens or train.sampling.max_completion_tokens for stage in train.stages])
    exact = "adapter_off" if train.method == "lora" else "resident"
    reference = exact if kl.reference == "exact" else kl.reference
    memory = train.memory
    prompt_cap = config.prepare.max_prompt_tokens
    devices = max(config.machine.ranks, 1) * config.machine.nodes if memory.over_ranks else 1
    tree: dict[str, Any] = {
        "devices": devices,
        "train": {
            "method": train.method,
            "rule": train.optimizer.kind,
            "dtype": config.base.dtype,
            "gradient_dtype": "float32",  # micro-batches add up in float32
            "residency": "resident" if memory.over_ranks and devices == 1 else memory.weights,
            "cold": memory.source,
            "resident_layers": memory.resident_layers,
            "slots": memory.prefetch + 2 if memory.prefetch else 1,
            "split": memory.split,
            "layer_major": train.layer_major,
            "optimizer_offload": {"none": "none", "cpu": "host", "nvme": "disk"}[train.optimizer.offload],
            "boundary": memory.boundaries,
            "recompute": train.activation_checkpointing or train.layer_major,
            "lora": {"rank": train.lora.rank, "target_modules": list(train.lora.target_modules)},
        },
        "sample": {
            "engine": train.sampler.kind,
            "page_tokens": 1,
            "sequences": min(train.sampler.slots, train.batch.samples_per_step),
        },
        "reference": {"kind": reference, "dtype": config.base.dtype if reference == "resident" else None},
        "batch": {
            "prompts_per_step": train.batch.prompts_per_step,
            "group_size": train.batch.group_size,
            "prompt_tokens": float(prompt_tokens or prompt_cap),
            "completion_tokens": float(completion_tokens or cap),
            "max_prompt_tokens": int(longest_prompt or prompt_cap),
            "max_completion_tokens": cap,
            "micro_batch_tokens": train.batch.micro_batch_tokens,
            "passes": train.batch.passes,
            "minibatches": train.batch.minibatches,
        },
        "schedule": {"kind": train.schedule, "steps": sum(stage.steps for stage in train.stages)},
    }
    if train.schedule == "async":
        tree["sample"] |= {"sync": train.sync.mode if train.sampler.kind == "vllm" else None, "sync_every": train.sync.sync_every}
        tree["sample"]["processes"] = train.sampler.processes if train.sampler.kind == "embedded" else 0
        tree["schedule"] |= {"max_lag": train.sync.max_policy_update_lag, "pool_samples": train.pool.capacity}
    if train.sampler.kind == "vllm":
        tree["sample"] |= _servers(config)
    return validate_as(Choices, tree, "plan")


def _servers(config: CampaignConfig) -> dict[str, Any]:
    """Return the choices of vLLM servers: those that run elsewhere are devices of their own, at least one each."""
    sampler, vllm = config.train.sampler, config.train.sampler.vllm
    servers = len(vllm.urls) or (sampler.processes if config.train.schedule == "async" else 1)
    return {
        "devices": len(vllm.urls),
        "tensor_parallel": None if vllm.urls else vllm.tensor_parallel_size,
        "sequences": max(1, servers) * vllm.concurrency,
        "page_tokens": 16,
        "kv_bits": 8 if vllm.kv_cache_dtype.startswith("fp8") else None,
    }


def plan_request(
    config: CampaignConfig, hardware: Hardware, card: ModelCard | None = None, lengths: Mapping[str, float | None] | None = None
) -> PlanRequest:
    """Return the request of a campaign on some hardware.

    Args:
        config: the resolved configuration.
        hardware: what it will run on.
        card: of the base; None reads it from base.source (a local directory, or the scratch model's settings).
        lengths: prompt_tokens, completion_tokens and longest_prompt where they are known, see `choices_of`.
    """
    card = card or card_of_base(config)
    return make_request(config.campaign.name, card, hardware, choices_of(config, **(lengths or {})))


def card_of_base(config: CampaignConfig) -> ModelCard:
    """Return the card of a campaign's base model.

    Raises:
        ConfigError: the base is a hub name, whose config is not on this machine.
    """
    from trainer.plan.skeleton import load_card

    return load_card(base_model(config))


def base_model(config: CampaignConfig) -> str | dict[str, Any]:
    """Return what `load_card` takes for a campaign's base model.

    Raises:
        ConfigError: the base is a hub name, whose config is not on this machine.
    """
    from trainer.plan.skeleton import library as known_models

    base = config.base
    if base.kind == "scratch":
        scratch = base.scratch
        return {
            "name": "scratch",
            "model_type": "llama",
            "hidden_size": scratch.hidden_size,
            "intermediate_size": scratch.intermediate_size,
            "num_hidden_layers": scratch.num_layers,
            "num_attention_heads": scratch.num_heads,
            "num_key_value_heads": scratch.num_heads,
            "vocab_size": len(scratch.alphabet) + 3,
            "tie_word_embeddings": False,
        }
    if base.kind == "hf" and (place := place_of(base.locator)).is_dir():
        return str(place)
    short = base.locator.rpartition(":")[2].rpartition("/")[2].lower()
    short = short.removesuffix("-instruct").replace("_", "-").removeprefix("llm-")
    for name in known_models():
        if name == short or name.startswith(short + "-"):
            return name
    raise ConfigError(
        "base.source",
        base.source,
        "its config.json is not on this machine, so it cannot be planned; put the model there, or give its shape to the plan: "
        f"--model DIRECTORY, or a known name ({nearest(short, known_models())})",
    )


def needs_torch(config: CampaignConfig) -> bool:
    """Whether a campaign's plan needs a skeleton, and so torch and transformers, which take seconds to import."""
    from trainer.plan.skeleton import is_quick, on_stacked_experts

    source = base_model(config)
    if not is_quick(source):
        return True
    return config.train.method == "lora" and on_stacked_experts(card_of_base(config), tuple(config.train.lora.target_modules))


def as_tree(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(mode="json")
