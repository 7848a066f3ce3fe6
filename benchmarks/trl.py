"""tithe's train stage beside TRL's GRPOTrainer on the CPU: samples per second, seconds to the goal, peak memory.

Same base model, prompts, group size, length cap, learning rate and schedule, optimizer, clip range, passes and minibatches,
no KL on either side; the same number of threads, each run in a process of its own, alternating (tithe, TRL, tithe, TRL).
Weights kept along the way are judged afterwards by one and the same evaluator, so no side pays for being watched.

    python -m benchmarks.trl            make bench-trl            expected: the table in the README

What differs, because the programs do: TRL scores the samples once more before it learns (old log-probs), samples with
`generate`, and judges in its own process by a direct call; tithe takes the sampler's log-probs, samples with its slots, judges in
killable workers, and writes metrics and a heartbeat inside its clock. TRL's logging and progress bars are off. What it costs to
keep weights for the evaluator is taken out of both clocks. Memory is the proportional set size of the process and its children:
the peak, and how far that is above what it was once everything was imported and the base had been loaded once. The clock starts
there too; loading the verifier is inside it on both sides.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trainer.config import CampaignConfig, as_tree, load_config, validate
from trainer.errors import ConfigError, TitheError
from trainer.files import read_json, write_json

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"
SIDES = ("tithe", "trl")
WARMUP_STEPS = 5  # left out of samples per second
SAMPLES_PER_PROMPT = 8  # of the evaluator
READY, RUN = "ready.json", "run.json"


@dataclass(frozen=True)
class Outcome:
    """What one run gave."""

    side: str
    round: int
    samples_per_second: float
    seconds_to_goal: float | None  # None: the goal was not reached
    peak_memory_bytes: int  # of the process tree
    growth_bytes: int  # of that, above what it had when all was imported
    total_seconds: float
    curve: list[tuple[int, float, float]]  # step, seconds since the start, pass@1 on held-out prompts


# --- the two sides, each in its own process ---------------------------------------------------------------------------


def say_ready(directory: Path) -> None:
    """Tell the parent that all imports are done: growth of memory is counted from here."""
    gc.collect()
    write_json(directory / READY, {"pid": os.getpid()})
    time.sleep(1.5)


def run_tithe(config: CampaignConfig, workspace: Path, directory: Path) -> None:
    """Train with tithe's own stage and leave its run directory, with all checkpoints, in `directory`."""
    import torch
    from transformers import AutoModelForCausalLM

    import trainer.schedule.sync as schedule
    from tasks.registry import StagePaths
    from tasks.train import run

    save, pauses = schedule.save_checkpoint, list[tuple[int, float]]()

    def save_off_the_clock(root: Path, step: int, *rest: Any) -> Path:
        before = time.time()
        made = save(root, step, *rest)
        pauses.append((step, time.time() - before))
        return made

    schedule.save_checkpoint = save_off_the_clock
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    AutoModelForCausalLM.from_pretrained(workspace / "artifacts" / "base")
    say_ready(directory)
    out = directory / "out"
    out.mkdir()
    inputs = {name: workspace / "artifacts" / name for name in ("prompts", "base", "anchors")}
    start = time.time()
    run(config, StagePaths(inputs=inputs, out=out, run=directory / "train", identity="benchmark"))
    write_json(directory / RUN, {"start": start, "end": time.time(), "pauses": pauses})


def run_trl(config: CampaignConfig, workspace: Path, directory: Path) -> None:
    """Train with TRL and leave step times and, now and then, the weights in `directory`."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from trainer.prompts import pack, read_prompts, unpack

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    judge = direct_judge(config)
    base = workspace / "artifacts" / "base"
    AutoModelForCausalLM.from_pretrained(base)
    say_ready(directory)
    start = time.time()
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    prompts = read_prompts(workspace / "artifacts" / "prompts", "train")
    for prompt in prompts[:50]:
        assert tuple(tokenizer(prompt.text)["input_ids"]) == prompt.token_ids, "TRL would see other tokens"
    rows = [{"prompt": p.text, "gold": p.answer, "scorer": json.dumps(pack(p.scorer))} for p in prompts]

    def reward(completions: list[str], gold: list[str], scorer: list[str], **_: Any) -> list[float]:
        return [judge(text, right, unpack(json.loads(data))) for text, right, data in zip(completions, gold, scorer, strict=True)]

    every = config.train.batch.optimizer_steps_per_step
    times: list[float] = []
    paused = 0.0

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            nonlocal paused
            if state.global_step % every:
                return
            times.append(time.time() - start - paused)
            step = state.global_step // every
            if step % config.train.checkpoints.every_steps == 0:
                before = time.time()
                keywords["model"].save_pretrained(directory / f"step_{step:06d}")
                paused += time.time() - before

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(**trl_arguments(config, directory)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Watch()],
        peft_config=trl_adapter(config),
    )
    trainer.train()
    write_json(directory / RUN, {"start": start, "end": time.time() - paused, "times": times})


def trl_arguments(config: CampaignConfig, directory: Path) -> dict[str, Any]:
    """Return the GRPOConfig that means the same as a campaign's configuration.

    Raises:
        ConfigError: the campaign uses what TRL has no equal of.
    """
    train = config.train
    batch, algorithm, optimizer = train.batch, train.algorithm, train.optimizer
    if len(train.stages) > 1:
        raise ConfigError("train.stages", len(train.stages), "the comparison knows one RL stage")
    if algorithm.advantage not in ("grpo", "dr_grpo"):
        raise ConfigError("train.algorithm.advantage", algorithm.advantage, "the comparison knows grpo and dr_grpo")
    losses = {"token_mean": "dapo", "sequence_mean": "grpo", "constant": "dr_grpo"}
    minibatch = batch.samples_per_step // batch.minibatches
    longest = config.prepare.max_prompt_tokens + train.sampling.max_completion_tokens
    micro = max(n for n in range(1, minibatch + 1) if minibatch % n == 0 and (n == 1 or n * longest <= batch.micro_batch_tokens))
    warmup = optimizer.warmup_steps
    cosine = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": optimizer.final_fraction}}
    constant = {"lr_scheduler_type": "constant_with_warmup"}
    return {
        "output_dir": str(directory / "out"),
        "max_steps": train.stages[0].steps * batch.optimizer_steps_per_step,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": minibatch // micro,
        "steps_per_generation": batch.samples_per_step // micro,
        "num_iterations": batch.passes,
        "num_generations": batch.group_size,
        "max_completion_length": train.sampling.max_completion_tokens,
        "temperature": train.sampling.temperature,
        "learning_rate": optimizer.learning_rate,
        "warmup_steps": warmup,
        **(cosine if optimizer.schedule == "cosine" else constant),
        "optim": "adamw_torch_fused",
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        "loss_type": losses[algorithm.aggregation],
        "scale_rewards": "group" if algorithm.advantage == "grpo" else "none",
        "epsilon": algorithm.clip_low,
        "epsilon_high": algorithm.clip_high,
        "delta": algorithm.dual_clip,
        "beta": 0.0,
        "mask_truncated_completions": algorithm.truncated == "mask",
        "gradient_checkpointing": train.activation_checkpointing,
        "seed": config.campaign.seed,
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "dataloader_num_workers": 0,
    }


def trl_adapter(config: CampaignConfig) -> Any:
    """Return the LoRA configuration, or None for full training."""
    if config.train.method == "full":
        return None
    from peft import LoraConfig

    lora = config.train.lora
    return LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha),
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules),
        task_type="CAUSAL_LM",
    )


def direct_judge(config: CampaignConfig) -> Callable[[str, str, dict[str, Any]], float]:
    """Return (answer, gold, scorer data) -> score by a call in this process: the cheapest way to judge.

    Raises:
        ConfigError: the campaign's verifier is none that can be called so.
    """
    if config.reward.verifier == "exact":
        return lambda answer, gold, scorer: float(answer.strip() == gold.strip())
    if config.reward.verifier != "reasoning_gym":
        raise ConfigError("reward.verifier", config.reward.verifier, "the comparison knows exact and reasoning_gym")
    scorers: dict[str, Any] = {}

    def judge(answer: str, gold: str, scorer: dict[str, Any]) -> float:
        task = scorer["task"]
        if task not in scorers:  # imported here, so that the clock and the scale see it on both sides
            from reasoning_gym import get_score_answer_fn

            scorers[task] = get_score_answer_fn(task)
        score = float(scorers[task](answer.strip(), scorer["entry"]))
        return score if score >= 1.0 or config.reward.partial_credit else 0.0

    return judge


# --- the parent: starts, weighs and judges ----------------------------------------------------------------------------


class Scale:
    """Weighs a process tree while it runs: proportional set size, above that at the moment when it said it was ready."""

    def __init__(self, pid: int, directory: Path):
        self.pid, self.directory = pid, directory
        self.base_bytes = 0
        self.peak_bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Scale:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            now = self._tree_bytes()
            if (self.directory / READY).exists():
                self.base_bytes = self.base_bytes or now
                self.peak_bytes = max(self.peak_bytes, now)

    def _tree_bytes(self) -> int:
        import psutil

        total = 0
        try:
            processes = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return 0
        for process in processes:
            try:
                total += process.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return total


def start_side(side: str, config_path: Path, workspace: Path, directory: Path, threads: int, limit_seconds: float) -> Scale:
    """Run one side to its end in a process of its own and return the scale that weighed it."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "benchmarks.trl", "--side", side]
    command += ["--config", str(config_path), "--workspace", str(workspace), "--directory", str(directory)]
    with open(directory / "log", "w", encoding="utf-8") as log:
        child = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            with Scale(child.pid, directory) as scale:
                code = child.wait(timeout=limit_seconds)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    if code:
        tail = "\n".join((directory / "log").read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        raise TitheError(f"{side} ended with code {code}; the end of {directory / 'log'}:\n{tail}")
    return scale


def step_times(side: str, directory: Path) -> list[float]:
    """Return, for every step, the seconds from the start to its end."""
    run = read_json(directory / RUN)
    if side == "trl":
        return list(run["times"])
    from trainer.metrics import METRICS, read_lines

    lines = [line for line in read_lines(directory / "train" / METRICS) if line["step"] > 0]
    paused = [sum(seconds for step, seconds in run["pauses"] if step < line["step"]) for line in lines]
    return [line["time"] - run["start"] - pause for line, pause in zip(lines, paused, strict=True)]


def weights_by_step(side: str, directory: Path) -> list[tuple[int, Path]]:
    """Return (step, file of weights) in order."""
    pattern = "step_*/*.safetensors" if side == "trl" else "train/checkpoints/step_*/weights.safetensors"
    found = {int(path.parent.name.removeprefix("step_")): path for path in directory.glob(pattern)}
    return sorted(found.items())


class Evaluator:
    """Judges weights of either side the same way: pass@1 at the evaluation's temperature on held-out prompts."""

    def __init__(self, config: CampaignConfig, workspace: Path):
        from trainer.policy.load import load_model
        from trainer.policy.tokenizer import load_tokenizer
        from trainer.prompts import read_prompts

        base = workspace / "artifacts" / "base"
        self.config, self.judge = config, direct_judge(config)
        self.tokenizer = load_tokenizer(base)
        self.base = base
        self.new_model = lambda: load_model(base)
        self.prompts = read_prompts(workspace / "artifacts" / "prompts", "heldout")[: config.evaluate.num_prompts]

    def pass_at_1(self, weights: Path | None) -> float:
        """Return the share of right answers; None judges the base."""
        from trainer.policy.load import eos_token_ids
        from trainer.rollout.embedded import EmbeddedSampler
        from trainer.types import Request, SamplingParams, derive_seed

        model = self.new_model()
        eos = eos_token_ids(model, self.tokenizer)
        if weights is not None:
            model = self._filled(model, weights)
        requests = [
            Request(prompt.id, prompt.token_ids, derive_seed("benchmark", prompt.id, index), index)
            for prompt in self.prompts
            for index in range(SAMPLES_PER_PROMPT)
        ]
        params = SamplingParams(self.config.evaluate.temperature, self.config.train.sampling.max_completion_tokens, eos)
        sampler = EmbeddedSampler(model, self.config.train.sampler.slots, self.tokenizer.pad_token_id or eos[0])
        completions = sampler.generate(requests, params)
        prompts = {prompt.id: prompt for prompt in self.prompts}
        right = 0
        for completion in completions:
            prompt = prompts[completion.prompt_id]
            ids = completion.token_ids[:-1] if completion.finish_reason == "stop" else completion.token_ids
            text = str(self.tokenizer.decode(list(ids), skip_special_tokens=True))
            right += self.judge(text, prompt.answer, prompt.scorer) >= self.config.evaluate.correct_at
        return right / len(completions)

    def _filled(self, model: Any, weights: Path) -> Any:
        """Return the model with a side's weights in it; a tensor that fits nowhere is an error."""
        from safetensors.torch import load_file

        tensors = load_file(weights)
        if self.config.train.method == "full":
            wrong = set(model.load_state_dict(tensors, strict=False).unexpected_keys)
            assert not wrong, f"{weights}: {sorted(wrong)[:3]}"
            return model
        from peft import get_peft_model, set_peft_model_state_dict

        adapted = get_peft_model(model, trl_adapter(self.config))
        tensors = {name.replace(".default.", "."): tensor for name, tensor in tensors.items()}
        wrong = set(set_peft_model_state_dict(adapted, tensors).unexpected_keys)
        assert not wrong, f"{weights}: {sorted(wrong)[:3]}"
        return adapted.eval()


def outcome(side: str, index: int, directory: Path, scale: Scale, evaluator: Evaluator, goal: float) -> Outcome:
    """Read what a run left and judge its weights."""
    times = step_times(side, directory)
    skip = min(WARMUP_STEPS, len(times) - 2)
    per_step = evaluator.config.train.batch.samples_per_step
    rate = per_step * (len(times) - 1 - skip) / (times[-1] - times[skip])
    curve = [(step, times[step - 1], evaluator.pass_at_1(path)) for step, path in weights_by_step(side, directory)]
    reached = next((seconds for _, seconds, score in curve if score >= goal), None)
    growth = scale.peak_bytes - scale.base_bytes
    return Outcome(side, index, rate, reached, scale.peak_bytes, growth, times[-1], curve)


def prepare(config: CampaignConfig, root: Path) -> None:
    """Make prompts and base once, with the stages themselves; what is current is left alone."""
    from tasks.registry import get_stage
    from tasks.stage import run_stage
    from tasks.workspace import Workspace

    for name in ("prepare", "base"):
        run_stage(Workspace(root, config), get_stage(name))


def compare(config: CampaignConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Run both sides in turn and return everything that was measured."""
    from rich.console import Console

    say = Console(stderr=True).print
    root = RESULTS / "trl-work"
    prepare(config, root)
    evaluator = Evaluator(config, root)
    base_score = evaluator.pass_at_1(None)
    say(f"base: pass@1 {base_score:.3f} on {len(evaluator.prompts)} held-out prompts; goal {options.goal}")
    outcomes: list[Outcome] = []
    for index in range(options.rounds):
        tree = as_tree(config)
        tree["campaign"]["seed"] = config.campaign.seed + index
        for side in options.sides:
            directory = root / "runs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{side}-{index}"
            directory.mkdir(parents=True)
            write_json(directory / "config.json", tree)
            scale = start_side(side, directory / "config.json", root, directory, options.threads, options.limit_seconds)
            one = outcome(side, index, directory, scale, evaluator, options.goal)
            outcomes.append(one)
            goal = "not reached" if one.seconds_to_goal is None else f"{one.seconds_to_goal:.1f} s"
            last = f", pass@1 at the end {one.curve[-1][2]:.3f}" if one.curve else ""
            say(f"round {index + 1}, {side}: {one.samples_per_second:.0f} samples/s, goal {goal}{last}")
    return {
        "goal": options.goal,
        "base_pass_at_1": base_score,
        "threads": options.threads,
        "machine": {"cores": os.cpu_count(), "processor": processor(), "python": platform.python_version()},
        "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
        "config": as_tree(config),
        "runs": [asdict(one) for one in outcomes],
        "summary": summary(outcomes),
    }


def processor() -> str:
    """Return the processor's name where the system tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def summary(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float | None]]:
    """Return each side's medians; the goal's is None when one of its runs did not reach it."""
    table: dict[str, dict[str, float | None]] = {}
    for side in dict.fromkeys(one.side for one in outcomes):
        own = [one for one in outcomes if one.side == side]
        goals = [one.seconds_to_goal for one in own if one.seconds_to_goal is not None]
        table[side] = {
            "samples_per_second": statistics.median(one.samples_per_second for one in own),
            "seconds_to_goal": statistics.median(goals) if len(goals) == len(own) else None,
            "peak_memory_bytes": statistics.median(one.peak_memory_bytes for one in own),
            "growth_bytes": statistics.median(one.growth_bytes for one in own),
            "total_seconds": statistics.median(one.total_seconds for one in own),
        }
    return table


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"tithe beside TRL {result['versions']['trl']}, {result['threads']} threads, {result['machine']['processor']}"
    )
    for column in ("", "tithe", "TRL", "tithe against TRL", "aim"):
        table.add_column(column, justify="left" if not column else "right")
    sides = result["summary"]
    rows = (
        ("samples per second", "samples_per_second", "{:,.0f}", 1.0, False, "2x"),
        (f"seconds to pass@1 {result['goal']:g}", "seconds_to_goal", "{:.1f}", 1.0, True, "3x faster"),
        ("seconds in all", "total_seconds", "{:.1f}", 1.0, True, ""),
        ("peak memory, MB", "peak_memory_bytes", "{:,.0f}", 1e6, False, "at most 1x"),
        ("of that above imports, MB", "growth_bytes", "{:,.0f}", 1e6, False, ""),
    )
    for label, key, form, unit, faster, aim in rows:
        own, other = (sides.get(side, {}).get(key) for side in SIDES)
        shown = [
            "-" if side not in sides else "not reached" if value is None else form.format(value / unit)
            for side, value in zip(SIDES, (own, other), strict=True)
        ]
        against = "-"
        if own and other:
            against = f"{other / own:.2f}x faster" if faster else f"{own / other:.2f}x"
        table.add_row(label, *shown, against, aim)
    console = Console()
    console.width = max(console.width, 110)
    console.print(table)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", type=Path, default=REPOSITORY / "params.yaml", help="default: the quickstart")
    parser.add_argument("-S", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side, alternating (default: 2)")
    parser.add_argument("--goal", type=float, default=0.85, help="held-out pass@1 to reach (default: 0.85)")
    parser.add_argument("--every", type=int, default=2, help="steps between weights that are kept (default: 2)")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="torch threads of each side (default: all cores)"
    )
    parser.add_argument("--limit-seconds", type=float, default=1800.0, help="longest that one run may take")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help=argparse.SUPPRESS)
    for internal in ("--side", "--config", "--workspace", "--directory"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that a child never outlives us
    try:
        if options.side:
            run = run_tithe if options.side == "tithe" else run_trl
            run(validate(read_json(Path(options.config))), Path(options.workspace), Path(options.directory))
            return 0
        same = [
            "train.algorithm.kl.reference=none",
            "train.heldout.every_steps=0",
            "preflight.num_prompts=0",
            f"train.checkpoints.every_steps={options.every}",
            "train.checkpoints.keep=100000",
        ]
        config = load_config(options.recipe, [*same, *options.overrides], REPOSITORY / "params.yaml")
        trl_arguments(config, RESULTS)
        os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
        result = compare(config, options)
        RESULTS.mkdir(parents=True, exist_ok=True)
        write_json(RESULTS / "trl.json", result)
        show(result)
    except TitheError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
