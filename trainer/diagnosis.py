"""What ails a run: rules over its series and events, no files and no torch. `tithe doctor` reads a run and asks here.

    Signs             what is known: configuration, series by metric, events, how the process is, what was planned
    pace(signs)       where the seconds of a step go
    diagnose(signs)   Findings, the worst first: what, where, on what evidence, and which knob to turn

Each symptom of the trouble table has one rule, a function from Signs to a Finding or None. A rule looks at the run as it was
recorded and never at one step alone: a threshold is passed by a median, or by a change against the run's own past. Steps at the
beginning, which warm up, are left out of times.

Symptoms: hang, host memory, collapse, gamed reward, KL explosion, gradient jumps, lag oscillation, slow tiers, slow sampling,
rollout drop, slow reward, slow pool, mismatch, no signal, slower than planned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Literal

from trainer.config.schema import CampaignConfig
from trainer.reward.hacking import watch

Point = tuple[float, float]  # step, value
Place = Literal["sampler", "learner", "reward", "pool", "transfer", "host memory", "training"]

ENOUGH_STEPS = 5  # before that nothing is said but that it is early
STALLED = 0.2  # share of learning spent waiting for weights; with prefetch 2 it is a few hundredths
WAITING = 0.4  # share of a step in which the learner waits for samples
BUSY = 0.85  # share of its time in which a sampler samples
JUDGING = 0.35  # share of a step in which rewards are judged
POOLING = 0.15  # share of a step spent in the pool's database
FULL = 0.9  # share of the host's memory
JUMP = 10.0  # times the median of the norms around it; the published case was 3 -> 300 -> 2
MUCH_KL = 10.0  # times what it was early in the run
STALE = 0.1  # share of samples dropped because they were too old
CALM_LAG = 20  # optimizer steps; past 50 loss and reward oscillate
SILENT = 0.9  # share of groups in which all rewards agree
SLOWER = 1.5  # times the planned seconds
_LOOKS = 100  # newest held-out looks that are searched for a gamed reward where no event tells of one
_FALL, _FALL_OF_PEAK = 0.05, 0.2  # of the reward, against noise


@dataclass(frozen=True)
class Signs:
    """What is known of a run."""

    config: CampaignConfig
    series: Mapping[str, Sequence[Point]]  # of training, finite values
    events: Sequence[Mapping[str, Any]] = ()
    status: str = "finished"  # running, finished, failed, killed, never begun
    error: str = ""
    silent_seconds: float | None = None  # of a running process: since its last sign of life
    doing: str = ""  # its last words
    planned: Mapping[str, float] = field(default_factory=dict)  # step_seconds, sample_seconds, learn_seconds, peak_bytes
    host_bytes: float | None = None

    def values(self, name: str, skip: int = 0) -> list[float]:
        return [value for _, value in self.series.get(name, ())][skip:]

    def middle(self, name: str, skip: int = 1) -> float:
        """Return the median of a series without its first points; 0 where there is none."""
        values = self.values(name, skip) or self.values(name)
        return median(values) if values else 0.0

    @property
    def num_steps(self) -> int:
        return len(self.values("time/step_seconds"))


@dataclass(frozen=True)
class Finding:
    symptom: str
    where: Place
    says: str  # one sentence
    evidence: tuple[str, ...]
    knob: str  # what to set, by key


Rule = Callable[[Signs], Finding | None]


def pace(signs: Signs) -> dict[str, float]:
    """Return the share of a step's seconds that each phase takes, the largest first."""
    seconds = {
        name.removeprefix("time/").removesuffix("_seconds"): signs.middle(name)
        for name in signs.series
        if name.startswith("time/") and name not in ("time/step_seconds", "time/heldout_seconds")
    }
    total = sum(seconds.values())
    shares = {name: value / total for name, value in seconds.items()} if total > 0 else {}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def diagnose(signs: Signs) -> list[Finding]:
    """Return what is wrong with a run, the worst first; empty for a healthy one."""
    rules = RULES if signs.num_steps >= ENOUGH_STEPS else (hang, host_memory)
    found = {finding.symptom: finding for rule in rules if (finding := rule(signs)) is not None}
    if "collapse" in found or "KL explosion" in found:
        found.pop("no signal", None)  # the end of it, and no cause
    if "gamed reward" in found and fall(signs.values("reward/mean")) is None:
        found.pop("collapse", None)  # only the held-out reward fell
    if "KL explosion" in found and not any("stale" in finding.says for finding in found.values()):
        first = found.pop("collapse", None)  # the effect after its cause
        if first is not None:
            place = list(found).index("KL explosion") + 1
            return [*list(found.values())[:place], first, *list(found.values())[place:]]
    return list(found.values())


# -- staying alive ----------------------------------------------------------------------------------------------------------

_HANG_WORDS = ("no sign of life", "delivered nothing", "no sample came", "passed its deadline")


def hang(signs: Signs) -> Finding | None:
    """Everything hangs: training and sampling wait for each other, or a process has stopped."""
    limit = signs.config.limits.silence_seconds
    evidence = []
    if signs.status == "running" and signs.silent_seconds is not None and signs.silent_seconds > min(limit, 120.0):
        evidence.append(f"the running process was last heard {signs.silent_seconds:.0f} s ago, {signs.doing or 'starting'}")
    told = [str(event.get("reason", "")) for event in signs.events if event.get("kind") in ("restart", "stop", "alarm")]
    evidence += [reason for reason in told if any(word in reason for word in _HANG_WORDS)][-3:]
    if any(word in signs.error for word in _HANG_WORDS):
        evidence.append(signs.error)
    if not evidence:
        return None
    if signs.config.train.schedule == "async":
        deadline = signs.config.train.watchdog.deadline_seconds
        knob = (
            "lower train.pool.high_watermark (samplers yield earlier) or give samplers less memory (train.sampler.slots); "
            f"train.watchdog.deadline_seconds ({deadline:g}) says when it is given up"
        )
        return Finding("hang", "sampler", "processes fell silent while others waited for them", tuple(evidence), knob)
    knob = f"limits.silence_seconds ({limit:g}) says when it is started again; `tithe resume` goes on from its checkpoint"
    return Finding("hang", "learner", "the stage fell silent", tuple(evidence), knob)


def host_memory(signs: Signs) -> Finding | None:
    """The host's memory is nearly full, or grows with every step."""
    total, used = signs.host_bytes, signs.values("memory/rss_bytes")
    killed = "SIGKILL" in signs.error or "memory runs out" in signs.error or "no space" in signs.error
    peak = max([*used, *signs.values("memory/rss_peak_bytes")], default=0.0)
    evidence = []
    if killed:
        evidence.append(signs.error)
    if total and peak > FULL * total:
        evidence.append(f"the trainer's peak was {peak / 1e9:.1f} GB of {total / 1e9:.1f} GB")
    if len(used) >= 20:
        growth = (median(used[-5:]) - median(used[len(used) // 2 - 2 : len(used) // 2 + 3])) / (len(used) / 2)
        if total and growth * 10 * len(used) > total - used[-1] and growth > 1e-4 * total:
            evidence.append(f"it grows by {growth / 1e6:.1f} MB a step; {(total - used[-1]) / growth:.0f} steps are left")
    if not evidence:
        return None
    memory = signs.config.train.memory
    first = "train.memory.weights: tiered with source: disk" if memory.weights == "resident" else "train.memory.resident_layers"
    tokens = signs.config.train.batch.micro_batch_tokens
    knob = f"lower train.batch.micro_batch_tokens ({tokens}) or train.sampler.slots, or set {first}"
    return Finding("host memory", "host memory", "the host's memory runs out", tuple(evidence), knob)


# -- learning ---------------------------------------------------------------------------------------------------------------


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return running means over `window` values, as many as fit."""
    return [fmean(values[i : i + window]) for i in range(len(values) - window + 1)]


def fall(values: Sequence[float]) -> tuple[int, float, float] | None:
    """Return where a curve had its peak, its height there and now, when it fell from it by more than its noise allows.

    Noise is the mean distance of neighbours; a fall is at least a twentieth, and a fifth of the peak.
    """
    if len(values) < 6:
        return None
    window = max(2, len(values) // 10)
    level = smooth(values, window)
    top = max(range(len(level)), key=lambda i: level[i])
    now = level[-1]
    noise = fmean(abs(b - a) for a, b in pairwise(values))
    drop = level[top] - now
    if drop > max(_FALL, _FALL_OF_PEAK * abs(level[top]), 3 * noise / math.sqrt(window)) and top < len(level) - 1:
        return top, level[top], now
    return None


def collapse(signs: Signs) -> Finding | None:
    """Reward rises, then falls off a cliff: the policy traded drift for reward, or steps are too large."""
    found, name = None, ""
    for name in ("reward/mean", "heldout/reward_mean"):
        found = fall(signs.values(name))
        if found is not None:
            break
    if found is None:
        return None
    index, top, now = found
    step = signs.series[name][min(index, len(signs.series[name]) - 1)][0]
    evidence = [f"{name} fell from {top:.3g} around step {step:g} to {now:.3g}"]
    config, kl = signs.config, signs.values("kl/mean")
    if kl:
        then = kl[min(int(step), len(kl) - 1)]
        evidence.append(f"KL to the reference went from {then:.3g} to {kl[-1]:.3g} nats a token meanwhile")
    drift, age = signs.values("anchors/drift"), signs.values("anchors/age_steps")
    anchored = config.train.algorithm.kl.reference == "anchors"
    stale = anchored and drift and drift[-1] > (config.anchors.max_drift or 0.3)
    if anchored and drift:
        evidence.append(
            f"the policy is {drift[-1]:.3g} nats from the one that drew the anchors, {age[-1] if age else 0:.0f} steps ago"
        )
    gap = signs.values("anchors/audit_gap")
    if anchored and gap and gap[-1] > config.anchors.audit_absolute:
        evidence.append(f"audits found the anchored KL {gap[-1]:.3g} nats beside the exact one")
        stale = True
    rate = config.train.optimizer.learning_rate
    calmer = f"lower train.optimizer.learning_rate ({rate:g}) to {rate / 5:.2g}"
    if stale or (anchored and not config.anchors.guarded):
        knob = f"set anchors.refresh_every: 200, anchors.max_drift: 0.3, anchors.audit_every: 50, against stale ones; {calmer}"
        return Finding("collapse", "training", "reward rose and then collapsed; the anchors are stale", tuple(evidence), knob)
    return Finding(
        "collapse",
        "training",
        "reward rose and then collapsed",
        tuple(evidence),
        f"{calmer}; `tithe resume` from a checkpoint before it",
    )


def gamed(signs: Signs) -> Finding | None:
    """Training reward rises while held-out reward falls."""
    told = [
        str(e.get("reason"))
        for e in signs.events
        if e.get("signal") in ("heldout_falls", "answers_grow", "answers_repeat", "answers_alike")
    ]
    names = (
        "reward/mean",
        "heldout/reward_mean",
        "completion/length_mean",
        "answers/distinct_fraction",
        "answers/repetition_fraction",
    )
    steps = sorted({step for name in names for step, _ in signs.series.get(name, ())})
    at = {name: dict(signs.series.get(name, ())) for name in names}
    history: list[dict[str, Any]] = [{"step": int(s), "metrics": {n: at[n][s] for n in names if s in at[n]}} for s in steps]
    looks = [index for index, line in enumerate(history) if "heldout/reward_mean" in line["metrics"]][-_LOOKS:]
    evidence = told[-2:] or [alarm.reason for look in looks for alarm in watch(history[: look + 1])][-2:]
    if not evidence:
        return None
    knob = "read the report's samples; then change the reward (a gate on format or length, tests that cannot be met by guessing)"
    return Finding("gamed reward", "reward", "the training reward rises at the cost of the held-out one", tuple(evidence), knob)


def kl_explosion(signs: Signs) -> Finding | None:
    """KL many times what it was, past its bound; answers get short and alike."""
    kl = signs.values("kl/mean")
    bound = signs.config.train.alarms.kl or 0.3
    if len(kl) < 8:
        return None
    early, late = median(kl[: max(3, len(kl) // 8)]), median(kl[-max(3, len(kl) // 8) :])
    peak = max(smooth(kl, 3))
    if not (peak > 2 * bound or late > max(bound, MUCH_KL * early)):
        return None
    evidence = [
        f"KL to the reference is {late:.3g} nats a token, was {early:.3g} early on, {peak:.3g} at its highest (bound {bound:g})"
    ]
    for name, what in (("entropy", "entropy"), ("completion/length_mean", "mean completion length")):
        values = signs.values(name)
        if len(values) >= 8 and fmean(values[-3:]) < 0.6 * fmean(values[:3]):
            evidence.append(f"{what} fell from {fmean(values[:3]):.3g} to {fmean(values[-3:]):.3g}: answers become alike")
    train = signs.config.train
    rate, coefficient, lora = train.optimizer.learning_rate, train.algorithm.kl.coefficient, train.method == "lora"
    target = 2e-5 if lora and rate > 2e-5 and signs.config.base.kind != "scratch" else rate / 5
    evidence.append(
        f"learning rate {rate:g}, KL coefficient {coefficient:g}; the learning rate matters more than the coefficient"
    )
    more = f", and raise train.algorithm.kl.coefficient from {coefficient:g} to 0.01" if coefficient < 0.01 else ""
    return Finding(
        "KL explosion",
        "training",
        "the policy runs away from its reference",
        tuple(evidence),
        f"lower train.optimizer.learning_rate to {target:.2g}{more}",
    )


def gradient_jumps(signs: Signs) -> Finding | None:
    """A gradient norm that jumps and comes back: no second moment and a noisy reward."""
    points = list(signs.series.get("grad/norm_max") or signs.series.get("grad/norm") or ())
    values = [value for _, value in points]
    jumps = []
    early = values[: max(4, len(values) // 4)]
    floor = median(early) if early else 0.0
    for i, (step, value) in enumerate(points):
        before, after = values[max(0, i - 8) : i], values[i + 1 : i + 9]
        if len(before) >= 3 and len(after) >= 3:  # up and down again, on both sides
            usual = max(median(before), median(after), floor)
            if value > JUMP * usual:
                jumps.append((step, value, usual))
    skips = [event for event in signs.events if event.get("kind") == "skip"]
    share = len(skips) / max(1, sum(1 for _ in points) * signs.config.train.batch.optimizer_steps_per_step)
    if not jumps and not (skips and share > 0.01):
        return None
    evidence = [
        f"step {step:g}: gradient norm {value:.3g}, {value / usual:.0f} times its neighbours' {usual:.3g}"
        for step, value, usual in sorted(jumps, key=lambda j: -j[1] / j[2])[:3]
    ]
    if skips:
        evidence.append(
            f"{len(skips)} optimizer steps were skipped; the last at step {skips[-1].get('step')}: {skips[-1].get('reason')}"
        )
    optimizer, factor = signs.config.train.optimizer, signs.config.train.heartbeat.factor
    knobs = []
    if factor == 0:
        knobs.append("set train.heartbeat.factor: 5, so that such a step is skipped and restored")
    if optimizer.max_grad_norm > 0.3:
        knobs.append(f"lower train.optimizer.max_grad_norm from {optimizer.max_grad_norm:g} to 0.3")
    knobs.append("more samples a step (train.batch.prompts_per_step) make the gradient less noisy")
    return Finding("gradient jumps", "training", "the gradient norm jumps", tuple(evidence), "; ".join(knobs))


def lag_oscillation(signs: Signs) -> Finding | None:
    """Samples so old that loss and reward oscillate, or that many are thrown away."""
    lag = signs.values("lag/mean", skip=1)
    sync, bound = signs.config.train.sync, signs.config.train.sync.max_policy_update_lag
    if signs.config.train.schedule != "async" or len(lag) < ENOUGH_STEPS:
        return None
    usual, highest = median(lag), max(signs.values("lag/max") or lag)
    dropped = signs.values("drop/stale_samples")
    learned = len(signs.values("time/step_seconds")) * signs.config.train.batch.samples_per_step
    share = dropped[-1] / (dropped[-1] + learned) if dropped and learned else 0.0
    alarmed = sum(event.get("signal") == "lag" for event in signs.events)
    if not (usual > CALM_LAG and highest > 1.5 * CALM_LAG) and share <= STALE and not alarmed > 0.1 * len(lag):
        return None
    evidence = [
        f"samples are {usual:.0f} optimizer steps old (median), {highest:.0f} at most (bound {bound}); "
        "20 is calm, past 50 training oscillates"
    ]
    per_step = signs.config.train.batch.optimizer_steps_per_step
    swings = reversals(signs.values("reward/mean"))
    if swings is not None and swings > 0:
        evidence.append(f"the smoothed reward turned {swings} times by more than a tenth of its range")
    if share > 0.01:
        evidence.append(f"{share:.0%} of the samples were dropped because they were too old")
    if alarmed:
        evidence.append(f"{alarmed} alarms of lag")
    knobs = [f"lower train.sync.max_policy_update_lag from {bound} to {max(CALM_LAG, per_step)}"]
    if sync.sync_every > per_step:
        knobs.append(f"train.sync.sync_every from {sync.sync_every} to {max(1, min(sync.sync_every, CALM_LAG) // 2)}")
    knobs.append(
        f"train.pool.capacity from {signs.config.train.pool.capacity} to {2 * signs.config.train.batch.samples_per_step}"
    )
    return Finding("lag oscillation", "pool", "samples are too old when they are learned from", tuple(evidence), "; ".join(knobs))


def reversals(values: Sequence[float]) -> int | None:
    """Return how often a smoothed curve turned by more than a tenth of its range; None when it is too short."""
    if len(values) < 12:
        return None
    level = smooth(values, max(3, len(values) // 12))
    least, turns, extreme, direction = 0.1 * (max(level) - min(level)), 0, level[0], 0
    for value in level:
        if direction >= 0 and value < extreme - least:
            turns, direction, extreme = turns + (direction > 0), -1, value
        elif direction <= 0 and value > extreme + least:
            turns, direction, extreme = turns + (direction < 0), 1, value
        elif (direction >= 0 and value > extreme) or (direction < 0 and value < extreme):
            extreme = value
    return turns


def no_signal(signs: Signs) -> Finding | None:
    """Groups whose rewards all agree teach nothing."""
    values = signs.values("reward/zero_variance_fraction")
    reward = signs.values("reward/mean")
    if len(values) < ENOUGH_STEPS or median(values[-ENOUGH_STEPS:]) < SILENT or not reward:
        return None
    level = fmean(reward[-ENOUGH_STEPS:])
    evidence = (
        f"in {median(values[-ENOUGH_STEPS:]):.0%} of the groups all answers get the same reward; the mean is {level:.3g}",
    )
    if level > 0.9:
        return None  # learned: there is nothing left to teach
    knob = (
        "take easier prompts, or raise train.batch.group_size or train.sampling.temperature; `tithe preflight` looks beforehand"
    )
    return Finding("no signal", "reward", "the reward hardly tells answers apart", evidence, knob)


def mismatch(signs: Signs) -> Finding | None:
    """Sampler and learner give different log-probs for the same tokens."""
    values = signs.values("mismatch/mean_abs_logprob")
    told = [str(e.get("reason")) for e in signs.events if e.get("signal") == "mismatch"]
    sync = signs.config.train.schedule == "sync"
    if not told and not (sync and len(values) >= ENOUGH_STEPS and median(values) > 0.05):
        return None
    evidence = tuple(told[-2:]) or (f"they are {median(values):.3g} nats apart at a sampled token (median)",)
    return Finding(
        "mismatch",
        "sampler",
        "sampler and learner do not agree on log-probs",
        evidence,
        "use the same dtype in both (base.dtype) and set train.algorithm.off_policy.mode: decoupled",
    )


# -- speed ------------------------------------------------------------------------------------------------------------------


def slow_tiers(signs: Signs) -> Finding | None:
    """Memory is low but steps are slow: weights are fetched when they are needed, not ahead."""
    stalled, learning = signs.middle("tiers/stalled_seconds"), signs.middle("time/learn_seconds")
    if not stalled or not learning or stalled < STALLED * learning:
        return None
    memory = signs.config.train.memory
    hits = signs.middle("tiers/hit_fraction")
    evidence = [f"{stalled:.3g} s of {learning:.3g} s of learning are spent waiting for weights ({stalled / learning:.0%})"]
    evidence.append(f"{hits:.0%} of the layers were there when they were needed; train.memory.prefetch is {memory.prefetch}")
    read = signs.middle("tiers/read_bytes")
    if read and learning:
        evidence.append(f"{read / 1e9:.3g} GB are read a step, {read / learning / 1e9:.2g} GB/s")
    if memory.prefetch < 2:
        knob = "set train.memory.prefetch: 2 (or more), so that layers are read while others compute"
    else:
        knob = (
            f"raise train.memory.resident_layers ({memory.resident_layers}), put train.memory.directory on a faster disk or set "
            "source: host; more tokens a step hide the transfer"
        )
    return Finding("slow tiers", "transfer", "steps wait for weights to be fetched", tuple(evidence), knob)


def _samplers(signs: Signs, what: str) -> dict[str, list[float]]:
    names = [name for name in signs.series if name.startswith("sampler/") and name.endswith(f"/{what}")]
    return {name.split("/")[1]: signs.values(name) for name in names}


def slow_sampling(signs: Signs) -> Finding | None:
    """The learner waits for samples while the samplers are busy."""
    step, waiting = signs.middle("time/step_seconds"), signs.middle("time/wait_seconds")
    if not step or waiting < WAITING * step:
        return None
    busy = {name: values[-1] for name, values in _samplers(signs, "busy_fraction").items() if values}
    evidence = [f"the learner waits {waiting:.3g} s of {step:.3g} s a step ({waiting / step:.0%}) for samples"]
    evidence += [f"sampler {name} is busy {share:.0%} of its time" for name, share in busy.items()]
    evidence += [
        f"sampler {name} makes {values[-1]:.0f} tokens a second"
        for name, values in _samplers(signs, "tokens_per_second").items()
        if values
    ]
    train = signs.config.train
    if busy and fmean(busy.values()) < BUSY:
        every = train.sync.sync_every
        knob = (
            f"raise train.pool.capacity ({train.pool.capacity}), which holds them back, or lower train.sync.sync_every ({every})"
        )
        return Finding(
            "slow sampling", "pool", "the learner waits for samples although samplers have time", tuple(evidence), knob
        )
    knobs = []
    if train.sampler.kind == "vllm" and train.sync.mode == "adapter":
        knobs.append("set train.sync.mode: merge (an adapter applied on the fly can be near 3x slower: measure both)")
    knobs.append(f"more train.sampler.slots ({train.sampler.slots}) or train.sampler.processes ({train.sampler.processes})")
    if train.sampler.kind == "embedded" and signs.config.base.kind != "scratch":
        knobs.append("train.sampler.kind: vllm")
    return Finding("slow sampling", "sampler", "the samplers set the pace", tuple(evidence), "; ".join(knobs))


def sampling_rates(signs: Signs) -> list[float]:
    """Return tokens per second of sampling, step by step: of the sampling phase, or of whole steps where the learner waits."""
    tokens, whole = dict(signs.series.get("throughput/tokens_per_second", ())), dict(signs.series.get("time/step_seconds", ()))
    if signs.config.train.schedule == "async":
        waits = signs.values("time/wait_seconds")
        late = waits[-len(waits) // 4 :]
        return list(tokens.values())[1:] if late and median(late) > WAITING * signs.middle("time/step_seconds") else []
    phase = dict(signs.series.get("time/sample_seconds", ()))
    return [tokens[s] * whole[s] / phase[s] for s in sorted(phase) if s in tokens and s in whole and phase[s] > 0][1:]


def rollout_drop(signs: Signs) -> Finding | None:
    """Tokens per second of sampling fall within the run."""
    rates, seconds = sampling_rates(signs), signs.values("time/step_seconds", 1)
    if len(rates) < 4 * ENOUGH_STEPS:
        return None
    quarter = len(rates) // 4
    early, late = median(rates[:quarter]), median(rates[-quarter:])
    if late > signs.config.train.alarms.throughput_drop * early:
        return None
    worst = min(range(quarter, len(rates)), key=lambda i: rates[i] - rates[i - 1])
    evidence = [f"{late:.0f} tokens a second at the end, {early:.0f} at the beginning; worst at {worst + 1} of {len(rates)}"]
    lengths = signs.values("completion/length_mean")
    if lengths and fmean(lengths[-quarter:]) > 1.5 * fmean(lengths[:quarter]):
        evidence.append(f"completions grew from {fmean(lengths[:quarter]):.0f} to {fmean(lengths[-quarter:]):.0f} tokens")
    if seconds:
        evidence.append(f"a step takes {median(seconds[-quarter:]):.3g} s, took {median(seconds[:quarter]):.3g} s")
    knob = (
        "see what else runs on the machine; lower train.sampler.slots if the KV cache is swapped, or "
        "train.sampling.max_completion_tokens"
    )
    return Finding("rollout drop", "sampler", "sampling became slower during the run", tuple(evidence), knob)


def slow_reward(signs: Signs) -> Finding | None:
    """Judging takes a large part of every step."""
    step, judging = signs.middle("time/step_seconds"), signs.middle("time/reward_seconds")
    if not step or judging < JUDGING * step:
        return None
    reward = signs.config.reward
    evidence = [f"judging takes {judging:.3g} s of {step:.3g} s a step ({judging / step:.0%})"]
    timeouts = signs.values("reward/status_timeout_fraction")
    if timeouts and timeouts[-1] > 0.01:
        evidence.append(f"{timeouts[-1]:.0%} of the judgements run into reward.timeout_seconds ({reward.timeout_seconds:g})")
    workers = reward.num_workers or "one per core"
    knob = f"raise reward.num_workers ({workers}), lower reward.timeout_seconds ({reward.timeout_seconds:g})"
    return Finding("slow reward", "reward", "the verifier sets the pace", tuple(evidence), knob)


def slow_pool(signs: Signs) -> Finding | None:
    """The pool's database takes a large part of every step."""
    share = signs.middle("pool/wait_fraction")
    if share < POOLING:
        return None
    evidence = (f"{share:.0%} of a step is spent in the pool's database",)
    knob = (
        "put the run directory on a local disk, or set train.pool.url to a postgresql:// address; larger steps claim more at once"
    )
    return Finding("slow pool", "pool", "the experience pool sets the pace", evidence, knob)


def slower_than_planned(signs: Signs) -> Finding | None:
    """A step takes much longer than the plan said."""
    planned, seen = signs.planned.get("step_seconds", 0.0), signs.middle("time/step_seconds")
    if not planned or seen < SLOWER * planned:
        return None
    evidence = [f"a step takes {seen:.3g} s, {planned:.3g} s were planned"]
    places: dict[str, Place] = {"sample": "sampler", "learn": "learner"}
    worst = 0.0
    where: Place = "learner"
    for phase, place in places.items():
        ahead, now = signs.planned.get(f"{phase}_seconds", 0.0), signs.middle(f"time/{phase}_seconds")
        if ahead and now:
            evidence.append(f"{phase}: {now:.3g} s, planned {ahead:.3g} s")
            if now - ahead > worst:
                worst, where = now - ahead, place
    knob = "see what else runs on the machine; `tithe plan --calibrate` teaches the plan this machine's real speed"
    return Finding("slower than planned", where, "steps are slower than the plan said", tuple(evidence), knob)


RULES: tuple[Rule, ...] = (
    hang,
    host_memory,
    collapse,
    kl_explosion,
    gamed,
    gradient_jumps,
    lag_oscillation,
    mismatch,
    no_signal,
    slow_tiers,
    slow_sampling,
    rollout_drop,
    slow_reward,
    slow_pool,
    slower_than_planned,
)
