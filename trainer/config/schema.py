"""Every key of a campaign, explained where it is defined. Frozen; unknown keys are errors; importable without torch.

    campaign  name and seed                      train     RL: what trains, how, on what, for how long
    prepare   prompts from sources               merge     adapter into a copy of the backbone
    base      the model that training starts at  evaluate  base beside trained
    anchors   cached reference distributions     report    the HTML page
    reward    who judges an answer               preflight a look at the reward before training
    reward_training  optional: a reward model    machine, limits  where and until when (never part of a result's identity)

A default here is the value of a key that `params.yaml` or the recipe does not set. Cross-field rules stand in the class
that owns the fields and name the key, the value and what to set instead (`refuse`).
"""

from __future__ import annotations

import re
from string import Formatter
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from trainer.errors import without_password

Scalar = bool | int | float | str
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
WIDEST_FIELD = 4096  # characters that a prompt template may pad a field to


FP8_ON_CPU = "vLLM's CPU engine has no fp8 matrices; set int8 or none, or give machine.device a GPU"


class Refusal(ValueError):
    """A combination that makes no sense: key (dotted, relative to the model that raises), value, why and what to set."""

    def __init__(self, key: str, value: object, problem: str):
        self.key, self.value, self.problem = key, value, problem
        super().__init__(problem)


def refuse(key: str, value: object, problem: str) -> NoReturn:
    raise Refusal(key, value, problem)


def without_secrets(instead: str) -> BeforeValidator:
    """Return a check that refuses an address with a password, which would stand in config.json, MLflow and the report.

    Args:
        instead: how to give it.
    """

    def check(value: object) -> object:
        if not isinstance(value, str):
            return value
        address = "".join(value.split())  # a password may hold spaces, which end an address in a text
        if (public := without_password(address)) != address:
            refuse("", public, f"holds a password, and whoever sees the run sees its configuration; leave it out and {instead}")
        return value

    return BeforeValidator(check)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False)


_TOKEN = without_secrets("name the environment variable that holds a token in token_variable")


class Campaign(Section):
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    """Lower-case name; also the name of its workspace and the prefix of its run directories."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Every draw of the campaign derives from it."""


class PromptSource(Section):
    """Where prompts come from. Each source is a set that an RL stage can name."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")] = "main"
    """Name by which an RL stage asks for it."""
    source: str
    """`reasoning_gym:<task>`, `jsonl:<file>`, `parquet:<file>`, or `hf:<dataset name or local directory>`. A relative path
    begins at the repository's root."""
    options: dict[str, Scalar | list[Scalar]] = {}
    """Passed to the source: a reasoning_gym task's own settings, or `config`, `split` (default
    `train`) and `revision` of a Hugging Face dataset."""
    num_rows: Count | None = None
    """Rows to take; None takes all (required for reasoning_gym, which has no end)."""
    prompt_template: str = "{question}"
    """Python format string over the row's fields (for reasoning_gym also those of its metadata, e.g. `{expression}=`).
    Nested fields as `{prompt[0][content]}`; a brace of the text itself is doubled."""
    remove_whitespace: bool = False
    """Take every space, tab and newline out of the finished prompt: for tokenizers that have no space, such as `scratch`."""
    answer_field: str = "answer"
    """The row's field with the gold answer; a dot reaches into a nested one, e.g. `reward_model.ground_truth`."""
    answer_pattern: str | None = None
    """Regular expression whose first group takes the answer out of that field, e.g. `#### (.+)$`."""
    scorer_fields: dict[str, str] = {}
    """What the verifier needs from a row beside the answer: name there -> field of the row. For `code`: `tests`, `entry_point`
    and `preamble`, e.g. {tests: test, entry_point: entry_point, preamble: prompt}. Then a row needs no answer."""
    chat_template: bool = False
    """Wrap the prompt as a user turn with the tokenizer's chat template."""
    system_prompt: str | None = None
    """System turn in front of it; only with chat_template."""

    @field_validator("source")
    @classmethod
    def _known_kind(cls, value: str) -> str:
        kind, _, rest = value.partition(":")
        if kind not in ("reasoning_gym", "jsonl", "parquet", "hf") or not rest:
            raise ValueError("expected reasoning_gym:<task>, jsonl:<file>, parquet:<file> or hf:<name or directory>")
        return value

    @field_validator("prompt_template")
    @classmethod
    def _is_template(cls, value: str) -> str:
        try:
            parts = [(name, spec or "") for _, name, spec, _ in Formatter().parse(value) if name is not None]
        except ValueError as error:
            raise ValueError(f"is no format string ({error}); double the braces that are text") from None
        names = [name for name, _ in parts]
        for name, spec in parts:
            if "{" in spec or any(int(number) > WIDEST_FIELD for number in re.findall(r"\d{1,20}", spec)):
                raise ValueError(f"has the format {spec!r} on {name!r}; a width is a number of at most {WIDEST_FIELD} characters")
        if not names or not all(re.match(r"[^\W\d]", name) for name in names):
            raise ValueError("needs a field of the row by its name, for example {question}; double the braces that are text")
        return value

    @field_validator("answer_pattern")
    @classmethod
    def _is_pattern(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                groups = re.compile(value).groups
            except re.error as error:
                raise ValueError(f"is no regular expression ({error})") from None
            if groups == 0:
                raise ValueError("has no group; put what is the answer in parentheses, for example #### (.+)$")
        return value

    @model_validator(mode="after")
    def _check(self) -> PromptSource:
        if self.kind == "reasoning_gym" and self.num_rows is None:
            refuse("num_rows", None, "a reasoning_gym task has no end; set how many rows to draw")
        if self.system_prompt is not None and not self.chat_template:
            refuse("system_prompt", self.system_prompt, "only used with a chat template; set chat_template: true")
        return self

    @property
    def kind(self) -> str:
        return self.source.partition(":")[0]

    @property
    def locator(self) -> str:
        return self.source.partition(":")[2]


class Prepare(Section):
    sources: Annotated[tuple[PromptSource, ...], Field(min_length=1)]
    """At least one."""
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of prompts, chosen by the hash of their text, that training never sees; curves and evaluation use them."""
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share that nothing looks at until a final evaluation asks for `split: test`."""
    max_prompt_tokens: Count = 512
    """Longer prompts are dropped, and counted."""

    @model_validator(mode="after")
    def _check(self) -> Prepare:
        names = [source.name for source in self.sources]
        if len(set(names)) < len(names):
            refuse("sources", names, "every source needs a name of its own")
        if self.heldout_fraction + self.test_fraction >= 1:
            refuse(
                "heldout_fraction", self.heldout_fraction, "with test_fraction it leaves no prompt to train on; lower one of them"
            )
        return self


class ScratchModel(Section):
    """A tiny Llama trained from nothing on the training prompts, so that a campaign needs no download."""

    alphabet: str = "0123456789+="
    """The characters that the tokenizer knows; each is one token. BOS is not used, EOS and padding are added."""
    hidden_size: Count = 128
    """Width of the model."""
    num_layers: Count = 2
    """Decoder layers."""
    num_heads: Count = 4
    """Attention heads of a layer."""
    intermediate_size: Count = 256
    """Width of the feed-forward part."""
    steps: Count = 600
    """Optimizer steps of the supervised training that makes it."""
    batch_size: Count = 128
    """Prompts a step; each is shown with its answer, and with the mistake if one is taught."""
    learning_rate: Positive = 2e-3
    """Peak learning rate of that training."""
    warmup_steps: Annotated[int, Field(ge=0)] = 50
    """Steps over which it rises."""
    decay_steps: Annotated[int, Field(ge=0)] = 200
    """The learning rate falls linearly to zero over the last so many steps."""
    mistake: Literal["none", "forget_carry"] = "none"
    """A systematic mistake taught beside the right answers: `forget_carry` adds digit by digit and drops every carry."""
    mistake_fraction: Fraction = 0.0
    """Weight of the mistake in the loss, beside the right answer."""

    @model_validator(mode="after")
    def _check(self) -> ScratchModel:
        if self.hidden_size % self.num_heads:
            refuse("hidden_size", self.hidden_size, f"must be a multiple of num_heads ({self.num_heads})")
        if self.decay_steps > self.steps:
            refuse("decay_steps", self.decay_steps, f"is more than steps ({self.steps}); set at most that")
        if len(set(self.alphabet)) != len(self.alphabet) or not self.alphabet:
            refuse("alphabet", self.alphabet, "needs each character once")
        return self


class Base(Section):
    source: str
    """`scratch`, `hf:<directory or hub name>`, or `gguf:<directory>` (one .gguf file inside); a relative path begins at the
    repository's root. A directory may be given as `package:<name>`: that of an installed Python package which ships the model."""
    revision: str | None = None
    """Hub revision (commit) to pin; only for a hub name."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the base is stored and computed. On a CPU float32 is many times faster."""
    scratch: ScratchModel = ScratchModel()
    """Only read when source is `scratch`."""

    @field_validator("source")
    @classmethod
    def _known_kind(cls, value: str) -> str:
        kind, _, rest = value.partition(":")
        if value != "scratch" and (kind not in ("hf", "gguf") or not rest):
            raise ValueError("expected scratch, hf:<directory or hub name> or gguf:<directory>")
        return value

    @property
    def kind(self) -> str:
        return self.source.partition(":")[0]

    @property
    def locator(self) -> str:
        return self.source.partition(":")[2]


class Anchors(Section):
    num_prompts: Annotated[int, Field(ge=0)] = 256
    """Training prompts that get anchors; 0 makes none."""
    completions_per_prompt: Count = 1
    """Completions that are stored for each prompt."""
    top_k: Count = 64
    """Log-probs kept at every token, beside the tail's mass. Capped at the vocabulary's size."""
    max_completion_tokens: Count | None = None
    """Length cap of anchored completions; None takes train.sampling's."""
    reference: Literal["auto", "resident", "adapter_off", "int8_streamed", "vllm"] = "auto"
    """Whose log-probs anchors hold: always the base's, by different means. `resident`: the base, loaded (tiered where
    train.memory says so) and dropped again. `adapter_off`: the policy's own backbone, with method lora. `int8_streamed`: with
    8-bit weights, layer by layer. `vllm`: the stage's anchors are drawn and scored by the servers of train.sampler.vllm, or by
    one that is started for it; refreshes as with `auto`. `auto`: adapter_off with lora, else resident."""
    source: Literal["reference", "policy"] = "reference"
    """Who scores the current policy's completions at a refresh: the fixed `reference`, called back for it, or the `policy`
    itself, which is then what the KL term holds on to; audits still measure its total drift from the reference."""
    refresh_every: Annotated[int, Field(ge=0)] = 200
    """Steps after which anchors are made anew on completions of the current policy; 0 never."""
    max_drift: Annotated[float, Field(ge=0)] = 0.3
    """Mean KL per anchored token between the policy that drew the anchors and the policy now; above it anchors are made anew.
    0 never."""
    audit_every: Annotated[int, Field(ge=0)] = 50
    """Steps between audits, which compare the anchored KL with the exact one on a step's own samples; 0 never."""
    audit_samples: Count = 256
    """Samples of the step, and anchored completions, that an audit looks at."""
    audit_relative: Annotated[float, Field(ge=0)] = 0.2
    """An audit makes anchors anew where the two KLs part by more than this share of the exact one,"""
    audit_absolute: Annotated[float, Field(ge=0)] = 0.02
    """and by more than so many nats a token."""

    keep: Count = 5
    """Newest versions kept on the disk, beside those that a checkpoint names."""

    @model_validator(mode="after")
    def _check(self) -> Anchors:
        if self.audit_every and self.audit_relative == 0 and self.audit_absolute == 0:
            refuse("audit_absolute", 0, "with audit_relative 0 every audit would make anchors anew; set one of them above 0")
        if self.source == "policy" and self.audit_every == 0:
            refuse("audit_every", 0, "with source: policy only audits see the drift from the reference; set it above 0")
        return self

    @property
    def guarded(self) -> bool:
        """Whether anything notices that anchors are stale."""
        return bool(self.refresh_every or self.max_drift or self.audit_every)


class Lora(Section):
    rank: Count = 32
    """Rank of the adapter; 32 is the value of method L."""
    alpha: Positive = 64
    """Scale of the adapter: its product is multiplied by alpha / rank. Twice the rank is usual."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Off whenever log-probs are scored. Above 0 the ratio differs from 1 already at the first update."""
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] = ("q_proj", "v_proj", "o_proj", "gate_proj")
    """Linear layers that get an adapter, by the end of their name."""


class Optimizer(Section):
    kind: Literal["adamw", "stateless"] = "adamw"
    """`adamw`: two moments for every trained weight. `stateless`: a rule that keeps nothing between steps, applied layer by layer
    in backward; only with method `full`."""
    rule: Literal["sgd", "sign", "rms", "sinkhorn"] = "rms"
    """Of `stateless`: the gradient itself, its sign, or the gradient divided by the matrix's RMS, or with rows and columns
    normalised in turns. All but `sgd` move each weight by about the learning rate; the scales of `sgd` are other ones."""
    learning_rate: Positive
    """Peak. About 2e-5 for LoRA on a real model, 1e-6 for all weights; the stateless rules have scales of their own."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the two moments of adamw."""
    eps: Positive = 1e-8
    """Added to the denominator of adamw."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled, of matrices only."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises linearly from zero."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """After the warm-up: constant, or cosine down to final_fraction of the learning rate at the RL stage's end."""
    final_fraction: Fraction = 0.1
    """Of `cosine`: where it ends, as a share of the learning rate."""
    max_grad_norm: Positive = 1.0
    """Norm to which gradients are clipped."""
    clipping: Literal["global", "per_layer", "two_pass", "previous"] | None = None
    """Whose norm is clipped; None: `global` for adamw, `per_layer` for stateless. `per_layer`: each layer's own, free.
    `two_pass`: the exact global norm, by running backward twice. `previous`: by the coefficient of the step before. The steps of
    `sign`, `rms` and `sinkhorn` have one length whatever the gradient's, so there it clips nothing."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """Of `stateless`, where weights are stored as bfloat16. `nearest` loses most of a small step, and is there to show it."""

    offload: Literal["none", "cpu", "nvme"] = "none"
    """Where adamw's two moments lie between steps: on the device, in host memory, or in files of the run directory. Costs time,
    and is refused below half a billion trained parameters."""
    offload_small: bool = False
    """Offload even so."""

    @property
    def clips(self) -> str:
        return self.clipping or ("global" if self.kind == "adamw" else "per_layer")

    @model_validator(mode="after")
    def _check(self) -> Optimizer:
        if self.kind == "adamw" and self.clips != "global":
            refuse("clipping", self.clipping, "adamw keeps all gradients, so their global norm is known; set clipping: global")
        if self.kind == "stateless" and self.offload != "none":
            refuse("offload", self.offload, "stateless keeps no state that could be moved; set none")
        if self.kind == "stateless" and self.clips == "global":
            refuse("clipping", "global", "stateless drops each gradient at once; set two_pass (exact), previous or per_layer")
        return self


class Memory(Section):
    """Where the weights are while they do not compute. `tiered` and `stateless` run layer by layer over all micro-batches."""

    weights: Literal["resident", "tiered", "sharded", "zero3"] = "resident"
    """`resident`: in the memory of the device. `tiered`: on a disk or the host, fetched layer by layer ahead of their use.
    `sharded`: a piece of every layer on each of machine.ranks processes (torch FSDP2); one is whole only while it computes.
    `zero3`: the same by DeepSpeed ZeRO-3 for the backbone of an adapter, whose AdamW state is in pieces too."""
    split: bool = False
    """Keep bfloat16 weights with 16 more bits that only the update reads: exact float32 for 4 bytes a weight."""
    source: Literal["disk", "host"] = "disk"
    """Of `tiered`: where cold layers lie. On a CPU, `host` is the memory that they compute in."""
    directory: str | None = None
    """Of `tiered`: a directory on a fast disk; None takes the run directory."""
    prefetch: Annotated[int, Field(ge=0)] = 2
    """Of `tiered`: layers fetched ahead. 0 fetches a layer when it is needed."""
    resident_layers: Annotated[int, Field(ge=0)] = 0
    """Of `tiered`: so many layers, the first ones, stay in memory; on a GPU on the device."""
    boundaries: Literal["device", "host"] = "device"
    """Where hidden states between layers wait for backward."""
    journal: Literal["disk", "memory"] = "disk"
    """Of resident weights: where a step keeps the old values of what it changes, to be undone as a whole."""

    @model_validator(mode="after")
    def _check(self) -> Memory:
        if self.weights != "tiered" and self.resident_layers:
            other = "layers lie in pieces on all ranks" if self.over_ranks else "all layers are resident"
            refuse("resident_layers", self.resident_layers, f"{other}; set weights: tiered, or leave this out")
        if self.weights == "sharded" and self.split:
            refuse("split", True, "pieces of sharded weights have no lower halves; leave it out, or set base.dtype: float32")
        return self

    @property
    def over_ranks(self) -> bool:
        """Whether processes share the weights."""
        return self.weights in ("sharded", "zero3")

    def too_many_stay(self, num_layers: int) -> str:
        """Return a sentence where more layers are to stay in memory than the model has; nothing elsewhere."""
        if self.resident_layers <= num_layers:
            return ""
        key = f"train.memory.resident_layers = {self.resident_layers}"
        return f"{key}: the model has {num_layers}, and where all of them stay nothing is saved; set fewer, or weights: resident"


class Heartbeat(Section):
    """A layer whose gradient norm jumps stops the optimizer step before any weight has changed for good."""

    factor: Annotated[float, Field(ge=0)] = 5.0
    """Times its usual norm (or standard deviations above it, where that is more) from which a layer stops the step; never less
    than so many times optimizer.max_grad_norm. 0 stops for values that are not finite only."""
    warmup_steps: Count = 20
    """Optimizer steps that are only watched."""


class Kl(Section):
    reference: Literal["none", "exact", "anchors", "int8_streamed"] = "none"
    """`exact`: every sample scored by the base (LoRA: the adapter off; full: a frozen copy). `anchors`: the cached file,
    no reference in memory. `int8_streamed`: a copy of the base with 8-bit weights, run layer by layer. `none`: no KL term."""
    coefficient: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the KL term. 0.01 with verifiable rewards, 0.001 with a learned one."""
    estimator: Literal["k2", "k3", "ratio_k3"] = "k2"
    """Gradient of the exact reference's term: `k2` exact reverse KL on-policy (its value is reported as k3), `k3` the
    forward KL's gradient, `ratio_k3` with gradient through the ratio."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive` moves the coefficient so that the KL stays near its target."""
    target: Positive = 0.05
    """Mean KL per token that the adaptive controller steers to."""
    horizon: Count = 100
    """Steps over which the adaptive controller reacts."""
    anchor_batch_size: Count = 32
    """Anchored completions in each optimizer step's KL term."""
    direction: Literal["policy_to_reference", "reference_to_policy"] = "policy_to_reference"
    """Of the anchored KL term: KL(policy || reference), or the other way round. What is reported is always the former."""


class OffPolicy(Section):
    mode: Literal["direct", "decoupled"] = "direct"
    """`direct`: the ratio is taken against the sampler's log-probs. `decoupled`: against the policy at the start of the
    update, re-scored by the learner, times a truncated weight between the two. Never both."""
    truncation: Positive = 2.0
    """Cap C of the decoupled weight."""


class Algorithm(Section):
    advantage: Literal["grpo", "rloo", "dr_grpo", "reinforce"] = "grpo"
    """`grpo`: reward minus the group's mean, over its standard deviation. `dr_grpo`: without the division. `rloo`: minus
    the mean of the others. `reinforce`: minus the mean of the whole batch."""
    clip_low: Positive = 0.2
    """The ratio to the sampled log-prob is clipped at 1 - clip_low ..."""
    clip_high: Positive = 0.2
    """... and at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] = 3.0
    """For negative advantages the loss never exceeds this times the advantage."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """`token_mean`: sum over tokens / number of tokens of the whole optimizer step. `sequence_mean`: mean of the samples'
    token means. `constant`: sum / (samples x length cap), as in Dr. GRPO."""
    truncated: Literal["keep", "mask"] = "keep"
    """Whether completions cut by the length cap train; they always stay in the group's baseline."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of an entropy bonus in the loss."""
    kl: Kl = Kl()
    off_policy: OffPolicy = OffPolicy()


class Batch(Section):
    prompts_per_step: Count = 64
    """Prompts (groups) sampled for one step."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """Completions sampled for one prompt."""
    passes: Count = 1
    """Times that the learner goes over a step's samples."""
    minibatches: Count = 1
    """Optimizer steps per pass."""
    micro_batch_tokens: Count = 8192
    """Padded tokens per forward pass; accumulation makes up the rest, with the same result."""

    @model_validator(mode="after")
    def _check(self) -> Batch:
        if self.group_size == 1:
            refuse("group_size", 1, "a group of one has no baseline, so every advantage is 0; set at least 2")
        if self.minibatches > self.samples_per_step:
            refuse(
                "minibatches", self.minibatches, f"is more than the {self.samples_per_step} samples of a step; set at most that"
            )
        return self

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def optimizer_steps_per_step(self) -> int:
        return self.passes * self.minibatches


class Sampling(Section):
    """One record for sampler and learner: both compute log_softmax(logits / temperature)."""

    temperature: Positive = 1.0
    """Of the sampling distribution, whose log-probs are stored."""
    max_completion_tokens: Count = 256
    """The common length cap of all completions."""
    top_p: Fraction = 1.0
    """1 is off."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 is off."""
    repetition_penalty: Positive = 1.0
    """1 is off."""

    @model_validator(mode="after")
    def _check(self) -> Sampling:
        off = {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
        for key, neutral in off.items():
            value = getattr(self, key)
            if value != neutral:
                refuse(key, value, f"training needs the log-probs of the untruncated distribution; set {key}: {neutral}")
        return self


class Vllm(Section):
    """vLLM servers, spoken to over HTTP. Only read when sampler.kind is `vllm`."""

    urls: tuple[Annotated[str, Field(pattern=r"^https?://[^/]+/?$"), _TOKEN], ...] = ()
    """Servers that run already, e.g. http://gpu1:8000, and see the run directory under the same path. None: every sampler
    process starts one on this machine."""
    model: str = ""
    """Name under which those servers know the backbone; empty takes the first that they list."""
    token_variable: str | None = None
    """Environment variable whose value those servers want as a bearer token; the token itself never stands in a recipe."""
    python: str = ".venv-vllm/bin/python"
    """Python of vLLM's own environment (`make vllm-env`), for a server that is started."""
    concurrency: Count = 64
    """Requests at the same time, on each server."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Of the paged KV cache; fp8 holds twice the tokens."""
    prefix_caching: bool = True
    """Prompts of a group are prefilled once."""
    kv_offload_bytes: Annotated[int, Field(ge=0)] = 0
    """Host memory into which KV blocks are swapped; 0 keeps them on the device."""
    tensor_parallel_size: Count = 1
    """Devices of one server."""
    eager: bool = True
    """Without graph capture: a faster start, somewhat slower tokens."""
    arguments: dict[str, str] = {}
    """Any other option of the server, e.g. {--gpu-memory-utilization: "0.85"}; an empty value is a flag."""
    environment: dict[str, str] = {}
    """Environment variables of a server that is started, e.g. {VLLM_CPU_KVCACHE_SPACE: "1"}."""


class Sampler(Section):
    kind: Literal["embedded", "vllm"] = "embedded"
    """`embedded`: in the trainer's process, or with `schedule: async` in processes of its own; continuous batching over slots
    with a static KV cache. `vllm`: vLLM servers, with `schedule: async`."""
    vllm: Vllm = Vllm()
    quantization: Literal["none", "int8", "int4", "fp8"] = "none"
    """Of the backbone that a vLLM server of the stage loads: a copy with 8- or 4-bit matrices, or, on GPUs, fp8 made in loading.
    The learner keeps its own; the probe's mismatch decides whether the engine's may be used (sync.probe_tolerance)."""
    slots: Count = 256
    """Completions decoded at the same time."""
    processes: Annotated[int, Field(ge=0, le=64)] = 1
    """Only with `schedule: async`: sampler processes that the stage starts. 0: all of them are started elsewhere, with
    `python -m trainer.schedule.sampler_process <run>/samplers/<name>.json`."""
    groups_per_claim: Annotated[int, Field(ge=0)] = 0
    """Only with `schedule: async`: groups that a sampler takes at once; 0 takes what fills its slots, at most a step's."""


class Pool(Section):
    """The experience pool between samplers and learner. Read with `schedule: async` and `colocated`."""

    url: Annotated[str, without_secrets("give it by the environment variable PGPASSWORD or in ~/.pgpass")] = ""
    """Empty: `experience.db`, SQLite, in the run directory (a local disk, never NFS). Or `postgresql://user@host/database`, for
    samplers on several machines; every run gets a schema of its own. A password comes from the environment variable PGPASSWORD
    or from ~/.pgpass, and never stands in a recipe."""
    capacity: Count = 4096
    """Samples ordered, ready or being learnt from at the same time."""
    high_watermark: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the capacity from which samplers are held back ..."""
    low_watermark: Annotated[float, Field(gt=0, le=1)] = 0.75
    """... until it has drained to this share."""
    max_attempts: Count = 5
    """A group that was handed out so often without an answer is given up, and counted."""

    @field_validator("url")
    @classmethod
    def _known_database(cls, value: str) -> str:
        if value and not re.match(r"(sqlite:///.|postgres(ql)?(\+\w+)?://.)", value):
            raise ValueError("expected postgresql://user@host/database, sqlite:///<file>, or nothing for the run directory")
        return value

    @model_validator(mode="after")
    def _check(self) -> Pool:
        if self.low_watermark > self.high_watermark:
            refuse("low_watermark", self.low_watermark, f"is above high_watermark ({self.high_watermark}); set at most that")
        return self


class PolicySync(Section):
    """How samplers get new policies, and how old their samples may be. Read with `schedule: async` and `colocated`."""

    mode: Literal["adapter", "merge", "auto"] = "adapter"
    """How vLLM gets a policy. `adapter`: hot, under a name per version. `merge`: summed in float32 into a copy of the backbone,
    which the engine reloads, so no other campaign can use the server. `auto`: both are measured once on this engine, and the
    faster that passes the probe is taken for the run. The embedded sampler always loads the weights themselves."""
    sync_every: Count = 20
    """Optimizer steps after which a new policy is handed over; sooner when the learner would have to wait. Colocated: after which
    it is probed and its hash written down; the sampler takes the newest weights whenever it begins."""
    max_policy_update_lag: Count = 32
    """Most optimizer steps between the policy that sampled and the one that learns. Older samples are dropped and counted."""
    keep: Annotated[int, Field(ge=2)] = 3
    """Newest handed-over policies kept on the disk, beside those in use."""
    probe_prompts: Count = 8
    """Fixed completions on which learner and sampler must agree after every load."""
    probe_tolerance: Positive | None = None
    """Most mean absolute difference of their log-probs; None: 1e-3, or 5e-2 for a bfloat16 base, a quantised sampler or an FP8
    KV cache. A sampler beyond it is never used."""

    @model_validator(mode="after")
    def _check(self) -> PolicySync:
        if self.sync_every > self.max_policy_update_lag:
            lag = self.max_policy_update_lag
            refuse("sync_every", self.sync_every, f"samples are too old when a new policy comes; set at most {lag}, the bound")
        return self


class Colocated(Section):
    """How sampling gets its turns between training micro-batches. Only read with `schedule: colocated`."""

    decode_turns: Count = 16
    """Decode steps, one token in every slot each, between two micro-batches. While training waits for samples, sampling has all
    the turns; while the pool is above its watermarks, none."""
    min_available_memory_bytes: Annotated[int, Field(ge=0)] = 256 * 1024**2
    """Memory of the device that must be free, or sampling gives its cache and its groups back and waits; 0 never does."""


class Watchdog(Section):
    """No wait without an end. Only read with `schedule: async`."""

    deadline_seconds: Positive = 300.0
    """A process without a sign of life for so long is ended and its work given to others; a wait ends with a named error."""
    start_seconds: Positive = 900.0
    """Time for a sampler to load its model, and for a vLLM server to start."""
    restarts: Annotated[int, Field(ge=0)] = 5
    """Times that a sampler that died or fell silent is started anew; then the run stops."""


class Alarms(Section):
    """Thresholds of what is watched every step; passing one is an event. 0 switches one off."""

    kl: Annotated[float, Field(ge=0)] = 0.3
    """Mean KL per token to the reference, as trained on and as audited: the hard bound, of both schedules."""
    effective_sample_fraction: Fraction = 0.3
    """Effective sample size over the number of tokens, below it."""
    throughput_drop: Fraction = 0.5
    """Samples per second below this share of the median of the last 20 steps."""
    lag_fraction: Fraction = 0.9
    """Mean lag above this share of max_policy_update_lag."""


class RLStage(Section):
    """One RL stage. What it leaves None it takes from train."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")] = "main"
    """Name in metrics and report."""
    steps: Count
    """Steps of this stage."""
    sources: tuple[str, ...] | None = None
    """Names of prepare.sources whose prompts it uses; None uses all."""
    max_completion_tokens: Count | None = None
    """Cap in this stage; None: the one of train.sampling."""
    learning_rate: Positive | None = None
    """Learning rate in this stage; None: the optimizer's."""


class Heldout(Section):
    every_steps: Annotated[int, Field(ge=0)] = 10
    """Greedy held-out accuracy every so many steps; 0 never looks."""
    num_prompts: Count = 256
    """Held-out prompts that are judged."""


class Checkpoints(Section):
    every_steps: Count = 10
    """Steps between two; a stop on request writes one more."""
    keep: Annotated[int, Field(ge=2)] = 2
    """Newest checkpoints kept; two at least, so that a damaged one has a predecessor."""


class Train(Section):
    method: Literal["lora", "full"]
    """What trains: an adapter on a frozen backbone, or every weight."""
    schedule: Literal["sync", "colocated", "async"] = "sync"
    """`sync`: sample, then learn, in one process. `async`: sampler processes fill an experience pool, the learner empties it.
    `colocated`: both in one process over one backbone; sampling into the pool takes turns between training micro-batches."""
    lora: Lora = Lora()
    """Only read when method is `lora`."""
    optimizer: Optimizer
    memory: Memory = Memory()
    heartbeat: Heartbeat = Heartbeat()
    algorithm: Algorithm = Algorithm()
    batch: Batch = Batch()
    sampling: Sampling = Sampling()
    sampler: Sampler = Sampler()
    pool: Pool = Pool()
    sync: PolicySync = PolicySync()
    colocated: Colocated = Colocated()
    watchdog: Watchdog = Watchdog()
    alarms: Alarms = Alarms()
    activation_checkpointing: bool = False
    """Recompute activations in backward: about half the memory, a third more time."""
    stages: Annotated[tuple[RLStage, ...], Field(min_length=1)]
    """RL stages, run in order; the policy goes on, optimizer and learning-rate schedule begin anew."""
    heldout: Heldout = Heldout()
    checkpoints: Checkpoints = Checkpoints()
    max_skipped_in_a_row: Count = 3
    """Optimizer steps that the heartbeat stops, or whose loss is not finite, are skipped; so many in a row end the run."""

    @property
    def layer_major(self) -> bool:
        """Whether an optimizer step runs layer by layer over all micro-batches."""
        return self.optimizer.kind == "stateless" or self.memory.weights not in ("resident", "zero3")

    @model_validator(mode="after")
    def _check(self) -> Train:
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            refuse("stages", names, "every RL stage needs a name of its own")
        stateless, tiered = self.optimizer.kind == "stateless", self.memory.weights == "tiered"
        if self.method == "lora" and stateless:
            refuse(
                "optimizer.kind", "stateless", "an adapter is small, so AdamW's state costs little; set adamw, or method: full"
            )
        if self.method == "full" and tiered and not stateless:
            refuse("memory.weights", "tiered", "AdamW's state is larger than the weights; set optimizer.kind: stateless")
        if self.memory.split and not stateless:
            refuse("memory.split", True, "only optimizer.kind: stateless writes to split weights; leave it out")
        if self.layer_major and self.activation_checkpointing:
            refuse("activation_checkpointing", True, "layer by layer, activations are always recomputed; leave it out")
        if self.layer_major and self.method == "lora" and self.lora.dropout:
            refuse("lora.dropout", self.lora.dropout, "tiered weights recompute each layer without its random state; set 0")
        if tiered and self.optimizer.offload != "none":
            refuse("optimizer.offload", self.optimizer.offload, "with tiered weights the adapter's state stays; set none")
        if self.memory.weights == "sharded":
            self._check_sharded()
        if self.memory.weights == "zero3":
            self._check_zero3()
        if stateless and self.algorithm.kl.reference == "exact":
            refuse("algorithm.kl.reference", "exact", "needs a second copy of all weights; set anchors or int8_streamed")
        if self.schedule != "sync":
            self._check_pooled()
        if self.schedule != "async" and self.sampler.kind == "vllm":
            refuse("sampler.kind", "vllm", "vLLM samples beside the learner; set schedule: async, or sampler.kind: embedded")
        if self.sampler.kind == "vllm" and self.method == "full" and self.sync.mode != "merge":
            refuse("sync.mode", self.sync.mode, "a full policy is no adapter; set sync.mode: merge")
        self._check_quantization()
        return self

    def _check_quantization(self) -> None:
        wanted = self.sampler.quantization
        if wanted == "none":
            return
        if self.sampler.kind != "vllm":
            refuse("sampler.quantization", wanted, "only vLLM computes with such weights; set sampler.kind: vllm, or none")
        if self.sampler.vllm.urls:
            refuse(
                "sampler.quantization", wanted, "servers that run already have loaded their weights; start them so, and set none"
            )
        if self.sync.mode != "adapter":
            problem = "rounding a merged backbone again would lose the adapter's change; set sync.mode: adapter"
            refuse("sync.mode", self.sync.mode, problem)

    def _check_sharded(self) -> None:
        if self.method == "lora" or self.optimizer.kind != "stateless":
            fix = "set method: full and optimizer.kind: stateless, or memory.weights: tiered for the backbone of an adapter"
            refuse("memory.weights", "sharded", f"pieces move by a stateless rule, all weights of them; {fix}")
        if self.optimizer.rule == "sinkhorn":
            refuse("optimizer.rule", "sinkhorn", "needs rows and columns whole, which no rank of a sharded run has; set rms")
        if self.schedule != "sync":
            refuse("schedule", self.schedule, "the ranks of a sharded run sample and learn in step; set schedule: sync")

    def _check_zero3(self) -> None:
        if self.method == "full" or self.optimizer.kind != "adamw":
            fix = "set method: lora and optimizer.kind: adamw, or memory.weights: sharded for a stateless rule over every weight"
            refuse("memory.weights", "zero3", f"shares the backbone of an adapter; {fix}")
        if self.schedule != "sync":
            refuse("schedule", self.schedule, "the ranks of zero3 sample and learn in step; set schedule: sync")
        if self.optimizer.offload == "nvme":
            refuse("optimizer.offload", "nvme", "DeepSpeed keeps pieces of AdamW's state in memory; set cpu or none")
        if self.lora.dropout:
            refuse("lora.dropout", self.lora.dropout, "the ranks of zero3 would each draw their own; set 0")
        if self.algorithm.kl.reference == "int8_streamed":
            problem = "the backbone is there already, with its adapter off; set exact or anchors"
            refuse("algorithm.kl.reference", "int8_streamed", problem)

    def _check_pooled(self) -> None:
        if self.schedule == "colocated" and self.method == "full":
            refuse("schedule", "colocated", "a sampler in the middle of its completions needs weights that stand still: a second "
                   "adapter is small, a second model is not; set method: lora, or schedule: sync")  # fmt: skip
        if self.layer_major:
            key, value = ("optimizer.kind", "stateless") if self.optimizer.kind == "stateless" else ("memory.weights", "tiered")
            refuse(key, value, "a sampler beside the learner needs a whole copy of the weights; set schedule: sync")
        batch, lag = self.batch, self.sync.max_policy_update_lag
        high = int(self.pool.capacity * self.pool.high_watermark)
        if high < batch.samples_per_step:
            refuse(
                "pool.capacity",
                self.pool.capacity,
                f"with high_watermark {self.pool.high_watermark} it holds {high} samples, a step needs {batch.samples_per_step}; "
                "raise it, or lower batch.prompts_per_step",
            )
        if batch.optimizer_steps_per_step > lag:
            refuse(
                "sync.max_policy_update_lag",
                lag,
                f"one step makes {batch.optimizer_steps_per_step} optimizer steps, so nothing sampled meanwhile can be used; "
                f"set at least {batch.optimizer_steps_per_step}, or schedule: sync",
            )
        if self.schedule == "async" and self.sampler.processes == 0 and not self.pool.url:
            refuse(
                "sampler.processes", 0, "samplers elsewhere need a pool they can reach; set pool.url to a postgresql:// address"
            )


VerifierName = Literal[
    "exact", "math", "reasoning_gym", "code", "regex", "format", "length", "python", "http", "reward_model", "mix"
]


class Code(Section):
    """Sandbox and limits of the `code` verifier, which reads `tests`, `entry_point` and `preamble` of the prompt's scorer data
    (prepare.sources.scorer_fields)."""

    sandbox: Literal["auto", "bubblewrap", "namespaces", "none-i-accept-the-risk"] = "auto"
    """`auto`: bubblewrap, else namespaces of our own; whichever holds here, tried at start. Without either, code rewards refuse
    to start unless this says `none-i-accept-the-risk`, which runs answers with your rights."""
    cpu_seconds: Count = 5
    """CPU time of each of an answer's processes; wall time is timeout_seconds."""
    memory_bytes: Annotated[int, Field(ge=64 * 1024**2)] = 512 * 1024**2
    """Address space of all of an answer's processes together."""
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that an answer may have; 1 forbids it to fork (threads are allowed)."""
    open_files: Annotated[int, Field(ge=16)] = 64
    """Open files of a candidate program."""
    scratch_bytes: Annotated[int, Field(ge=64 * 1024)] = 16 * 1024**2
    """Size of its private scratch folder, empty for every answer."""
    output_bytes: Count = 1024**2
    """Bytes of stdout, for tests by stdin and stdout."""
    preload: tuple[str, ...] = ()
    """Modules imported once per worker, so that an answer's own import of them is free, e.g. [numpy]."""


class Length(Section):
    """The soft over-long penalty: 0 up to max_length - buffer, then linearly down to -1 at max_length and beyond."""

    unit: Literal["tokens", "characters"] = "tokens"
    """What the length is counted in."""
    max_length: Count = 1024
    """From here on the penalty is whole."""
    buffer: Count = 256
    """Over so much before it, the penalty rises linearly."""

    @model_validator(mode="after")
    def _check(self) -> Length:
        if self.buffer > self.max_length:
            refuse("buffer", self.buffer, f"is more than max_length ({self.max_length}); set at most that")
        return self


class Http(Section):
    """A remote judge: POST of JSON {prompt, answer, gold, scorer} to url, which replies {"score": number}."""

    url: Annotated[str, Field(pattern=r"^(https?://.+)?$"), _TOKEN] = ""
    """Address that answers are sent to."""
    token_variable: str | None = None
    """Environment variable whose value is sent as a bearer token; the token itself never stands in a recipe."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Further attempts after a lost connection, 429 or 5xx; all attempts share timeout_seconds."""
    backoff_seconds: Positive = 0.5
    """Wait before the first retry; doubles each time."""
    concurrency: Annotated[int, Field(ge=1, le=64)] = 8
    """Requests at the same time."""


class LearnedReward(Section):
    """The `reward_model` verifier: a sequence-classification model whose first logit is the score."""

    model: str = ""
    """Local directory or hub name, e.g. artifacts/reward_model: what the optional stage reward_model trained."""
    revision: str | None = None
    """Hub revision to pin."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type in which it computes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it computes."""
    int8: bool = False
    """Keep linear layers as INT8 with one scale per row: a quarter of the float32 bytes, multiplied in dtype."""
    batch_size: Count = 16
    """Answers scored together."""
    max_tokens: Count = 2048
    """Longer texts lose their beginning."""
    squash: Literal["none", "sigmoid"] = "sigmoid"
    """`sigmoid`: score in (0, 1). `none`: the bare logit."""
    separator: str | None = None
    """Put between prompt and answer; None takes what the model was trained with here, else nothing."""


class Judge(Section):
    """One verifier with its options."""

    verifier: VerifierName = "exact"
    """`exact`: equal to the gold answer after stripping. `math`: equal as mathematics (math-verify). `reasoning_gym`: the
    task's own scorer. `code`: unit tests in a sandbox. `regex`: `pattern` is found (its group, if any, must equal the gold
    answer). `format`: the whole answer fits `pattern`. `length`: over-long penalty. `python`: your own `function`. `http`: a
    remote judge. `reward_model`: a learned one. `mix`: the sum of `parts`."""
    partial_credit: bool = True
    """Whether a score between 0 and 1 counts; false makes it 0."""
    timeout_seconds: Positive = 5.0
    """Limit of one judgement; then its process is killed."""
    timeout_score: float = 0.0
    """Score of an answer whose judgement ran into the limit. It is never judged again."""
    extract: Literal["whole", "tag", "boxed", "auto"] = "whole"
    """What `exact` and `reasoning_gym` judge: the whole answer, what stands in <answer> tags, in the last \\boxed, or wherever
    `math` would look. Where that is missing the answer is unparsable."""
    pattern: str | None = None
    """Regular expression of `regex` and `format`; None is for format `<think>...</think><answer>...</answer>`."""
    function: str | None = None
    """`package.module:name` of a Python function (prompt, answer, gold, scorer) -> number or bool, for `python`."""
    code: Code = Code()
    length: Length = Length()
    http: Http = Http()
    reward_model: LearnedReward = LearnedReward()

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"is not a regular expression ({error})") from None
        return value

    @field_validator("function")
    @classmethod
    def _has_module(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
            raise ValueError("expected package.module:name")
        return value

    @model_validator(mode="after")
    def _check(self) -> Judge:
        needs = {"regex": ("pattern", self.pattern), "python": ("function", self.function), "http": ("http.url", self.http.url)}
        needs["reward_model"] = ("reward_model.model", self.reward_model.model)
        key, value = needs.get(self.verifier, ("", True))
        if not value:
            refuse(key, value, f"the {self.verifier} verifier needs it; set it")
        return self


class RewardPart(Judge):
    name: Annotated[str, Field(pattern=r"^([a-z0-9][a-z0-9_-]*)?$")] = ""
    """Name in samples and metrics; empty takes the verifier's."""
    weight: float = 1.0
    """Weight of this part in the sum."""
    gate: bool = False
    """A gate is not added: where its score is below `gate_at` the whole reward is `reward.gate_score`."""
    gate_at: float = 1.0
    """Of a gate: the reward that opens it."""

    @model_validator(mode="after")
    def _no_mix(self) -> RewardPart:
        if self.verifier == "mix":
            refuse("verifier", "mix", "a part is one verifier; list all parts side by side")
        return self

    @property
    def label(self) -> str:
        return self.name or self.verifier


class Reward(Judge):
    """Who judges an answer. One verifier, or `verifier: mix` with several `parts`."""

    parts: tuple[RewardPart, ...] = ()
    """Only with `mix`: the reward is the sum of weight x score. The first part says what an answer's status is."""
    gate_score: float = 0.0
    """Reward of an answer that a gate refuses."""
    num_workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Processes per verifier that judge at the same time; 0 takes one per core."""

    @model_validator(mode="after")
    def _check_parts(self) -> Reward:
        if (self.verifier == "mix") != bool(self.parts):
            refuse("parts", list(self.parts), "parts and `verifier: mix` belong together; set both or neither")
        labels = [part.label for part in self.parts]
        if len(set(labels)) < len(labels):
            refuse("parts", labels, "every part needs a name of its own")
        if self.parts and all(part.gate for part in self.parts):
            refuse("parts", labels, "gates alone make no reward; add a part that is none")
        return self

    @property
    def judges(self) -> tuple[Judge, ...]:
        """Every verifier at work: the parts of a mix, or this one."""
        return self.parts or (self,)


class Preflight(Section):
    """A look at the reward on the base's completions, before training and by `tithe preflight`."""

    num_prompts: Annotated[int, Field(ge=0)] = 32
    """Training prompts looked at, each with a group of completions, but never more than one step has; 0 skips the look before
    training."""
    stop: bool = False
    """Whether a reward that cannot teach (no difference within any group, or another verdict for the same answer) stops the
    training before its first step; else it is an alarm in events.jsonl."""


class RewardTraining(Section):
    """The optional stage reward_model: a small reward model from preference pairs, in artifacts/reward_model."""

    pairs: str
    """JSONL file of pairs; a relative path begins at the repository's root."""
    prompt_field: str = "prompt"
    """Field of a pair with the prompt."""
    chosen_field: str = "chosen"
    """Field with the better answer."""
    rejected_field: str = "rejected"
    """Field with the worse one."""
    base: str = "scratch"
    """`scratch`: a tiny Llama over the pairs' characters; else a model directory or hub name, whose head begins anew."""
    hidden_size: Count = 64
    """Only for scratch, as num_layers and num_heads."""
    num_layers: Count = 2
    """Decoder layers, of a model from scratch."""
    num_heads: Count = 4
    """Attention heads, of a model from scratch."""
    separator: str = ""
    """Put between prompt and answer."""
    max_tokens: Count = 1024
    """Longer pairs are cut."""
    epochs: Count = 3
    """Passes over the pairs."""
    batch_size: Count = 16
    """Pairs a step."""
    learning_rate: Positive = 1e-3
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled."""
    max_grad_norm: Positive = 1.0
    """Norm to which gradients are clipped."""
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of prompts whose pairs only measure accuracy."""
    min_heldout_accuracy: Annotated[float, Field(ge=0, le=1)] = 0.55
    """A model below it is refused: it would teach noise."""


class Merge(Section):
    dtype: Literal["base", "float32", "bfloat16"] = "base"
    """Type of the merged weights; `base` keeps each tensor's own. The sum is made in float32 and rounded once."""
    max_shard_bytes: Count = 5 * 1000**3
    """Size of a safetensors file."""


class Evaluate(Section):
    split: Literal["heldout", "test"] = "heldout"
    """Which prompts: those that curves use, or those that nothing has looked at yet."""
    num_prompts: Count = 256
    """Prompts of each side."""
    samples_per_prompt: Count = 8
    """Completions of each prompt, for pass@k."""
    pass_at: Annotated[tuple[Count, ...], Field(min_length=1)] = (1, 4, 8)
    """The k of pass@k, estimated without bias from samples_per_prompt samples."""
    temperature: Positive = 1.0
    """Of those completions; greedy accuracy is measured besides."""
    correct_at: Fraction = 1.0
    """Score from which an answer counts as correct."""
    bootstrap_resamples: Count = 2000
    """Resamples of the confidence intervals."""
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Of the intervals."""

    @model_validator(mode="after")
    def _check(self) -> Evaluate:
        if max(self.pass_at) > self.samples_per_prompt:
            refuse("pass_at", max(self.pass_at), f"needs as many samples; raise samples_per_prompt ({self.samples_per_prompt})")
        return self


class Report(Section):
    num_examples: Annotated[int, Field(ge=0)] = 12
    """Prompts shown with the base's and the trained model's answer."""


class Machine(Section):
    """What computes. Never part of a result's identity: a run may go on with another number of ranks."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where torch computes; `auto` takes a GPU if there is one."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Torch threads of the worker, of all its ranks together; 0 takes all cores."""
    ranks: Annotated[int, Field(ge=0)] = 0
    """Processes on each machine that share the weights; with train.memory.weights: sharded or zero3. 0: one a GPU, or one."""
    nodes: Count = 1
    """Machines that do so; each of the others is started with the command that the run's first event tells."""
    rendezvous: str = ""
    """host:port of one of those machines, at which all ranks meet; needed with more than one."""
    patience_seconds: Positive = 1800.0
    """Time that a rank waits for the others, for their start too; then the run ends with a named error."""

    @model_validator(mode="after")
    def _check(self) -> Machine:
        if self.nodes > 1 and not re.fullmatch(r"[^:\s]+:\d+", self.rendezvous):
            refuse("rendezvous", self.rendezvous, f"{self.nodes} machines need a place to meet; set host:port of one of them")
        return self


class Limits(Section):
    """When the platform steps in. Never part of a result's identity."""

    stage_hours: Positive = 168
    """A stage that takes longer is stopped, and the campaign with it."""
    silence_seconds: Positive = 900
    """A stage whose last heartbeat is older is stopped and started again."""
    grace_seconds: Positive = 60
    """Time for a checkpoint between the request to stop and the kill."""
    retries: Annotated[int, Field(ge=0)] = 2
    """Further attempts after what can heal: a crash, a kill, silence. A mistake in configuration or data is never tried again."""


class CampaignConfig(Section):
    """A whole campaign. `config.json` in a run directory is this, resolved."""

    campaign: Campaign
    prepare: Prepare
    base: Base
    anchors: Anchors = Anchors()
    train: Train
    reward: Reward = Reward()
    preflight: Preflight = Preflight()
    reward_training: RewardTraining | None = None
    merge: Merge = Merge()
    evaluate: Evaluate = Evaluate()
    report: Report = Report()
    machine: Machine = Machine()
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _check(self) -> CampaignConfig:
        known = {source.name for source in self.prepare.sources}
        for index, stage in enumerate(self.train.stages):
            unknown = sorted(set(stage.sources or ()) - known)
            if unknown:
                refuse(f"train.stages.{index}.sources", unknown, f"no such entry in prepare.sources; there are {sorted(known)}")
        if self.train.memory.split and self.base.dtype == "float32":
            refuse("train.memory.split", True, "float32 weights are whole already; set base.dtype: bfloat16, or leave it out")
        if not self.train.memory.over_ranks and max(self.machine.ranks, self.machine.nodes) > 1:
            key = "ranks" if self.machine.ranks > 1 else "nodes"
            problem = "only shared weights have several; set train.memory.weights: sharded or zero3, or leave it out"
            refuse(f"machine.{key}", getattr(self.machine, key), problem)
        if self.train.sampler.quantization == "fp8" and self.machine.device == "cpu":
            refuse("train.sampler.quantization", "fp8", FP8_ON_CPU)
        self._check_anchors()
        if self.train.algorithm.kl.reference == "anchors" and self.anchors.num_prompts == 0:
            refuse("train.algorithm.kl.reference", "anchors", "anchors.num_prompts is 0; set it above 0 or use reference: exact")
        kl = self.train.algorithm.kl
        if kl.reference != "anchors" and kl.direction != "policy_to_reference":
            refuse(
                "train.algorithm.kl.direction",
                kl.direction,
                f"samples of the policy only give the other direction with reference: {kl.reference}; set estimator: k3 for this "
                "one's gradient, or reference: anchors",
            )
        self._check_reward()
        return self

    def _check_anchors(self) -> None:
        temperature = self.train.sampling.temperature
        if self.anchors.reference == "adapter_off" and self.train.method == "full":
            refuse("anchors.reference", "adapter_off", "every weight trains, so nothing can be switched off; set resident")
        if self.anchors.reference in ("resident", "int8_streamed") and self.train.memory.weights == "zero3":
            problem = "the ranks of zero3 hold the backbone already, with its adapter off; set auto"
            refuse("anchors.reference", self.anchors.reference, problem)
        if self.anchors.reference == "vllm" and temperature != 1:
            refuse(
                "anchors.reference",
                "vllm",
                f"vLLM scores prompts at temperature 1, train.sampling.temperature is {temperature:g}; set that 1, or resident",
            )

    def _check_reward(self) -> None:
        for index, judge in enumerate(self.reward.judges):
            key = f"reward.parts.{index}" if self.reward.parts else "reward"
            if judge.verifier == "reasoning_gym":
                other = [s.source for s in self.prepare.sources if s.kind != "reasoning_gym"]
                if other:
                    refuse(f"{key}.verifier", "reasoning_gym", f"{other[0]} has no reasoning_gym scorer; set exact or math")
            if judge.verifier == "code":
                for number, source in enumerate(self.prepare.sources):
                    if "tests" not in source.scorer_fields:
                        problem = "the code verifier needs to know where the tests stand; add tests: <field of the row>"
                        refuse(f"prepare.sources.{number}.scorer_fields", source.scorer_fields, problem)

    def warnings(self) -> list[str]:
        """Return sentences about choices that are allowed but seldom meant."""
        said = []
        rate, lora = self.train.optimizer.learning_rate, self.train.lora
        if self.train.method == "lora" and lora.dropout > 0:
            said.append(f"train.lora.dropout = {lora.dropout}: with dropout the ratio differs from 1 already at the first update")
        if self.train.algorithm.kl.reference == "anchors" and not self.anchors.guarded:
            said.append("anchors: no refresh, drift limit or audit: stale anchors let the policy trade real drift for reward")
        stateless, rule = self.train.optimizer.kind == "stateless", self.train.optimizer.rule
        if stateless and rule == "sgd" and rate < 1e-3:
            said.append(
                f"train.optimizer.learning_rate = {rate}: low for sgd, whose step is rate x gradient; 1e-2 to 1 is usual, "
                "and update/relative says what it does"
            )
        if stateless and rule != "sgd" and rate > 1e-3:
            said.append(
                f"train.optimizer.learning_rate = {rate}: high for {rule}, which moves each weight by it; try 1e-6 to 1e-4"
            )
        if stateless and rule != "sgd" and self.train.optimizer.clips != "per_layer":
            said.append(
                f"train.optimizer.clipping = {self.train.optimizer.clipping}: clips nothing, for the steps of {rule} have one "
                "length whatever the gradient's; only sgd is clipped"
            )
        if self.train.method == "full" and not stateless and self.base.kind != "scratch" and rate > 1e-4:
            said.append(f"train.optimizer.learning_rate = {rate}: high for training every weight; 1e-6 to 1e-5 is usual")
        if self.train.method == "lora" and self.base.kind != "scratch" and rate < 1e-6:
            said.append(
                f"train.optimizer.learning_rate = {rate}: low for LoRA, which needs about 10x the full rate; 2e-5 is usual"
            )
        return said


def as_tree(config: BaseModel) -> dict[str, Any]:
    """Return a configuration as plain JSON types."""
    return config.model_dump(mode="json")
