"""A backbone sharded over ranks by DeepSpeed ZeRO-3 under an adapter, whose gradients and AdamW state are in pieces too.

    a term for each rank -> scores to all ranks -> losses, the same everywhere -> each rank's own backward, averaged into pieces
    -> norm of every weight, over all pieces -> heartbeat -> clip -> AdamW on the pieces

Only DeepSpeed's stable surface is used: keys of its configuration, `zero.Init` (through transformers), `initialize` with an
optimizer of ours, `backward`, `step`, `GatheredParameters` and the `safe_*` functions. It is imported here alone, and only where
it is chosen. Its known failures are silent, so every start begins with `self_test`. Left out: a second model beside the policy,
and DeepSpeed's own kernels, checkpoints, schedules and launcher.

Every call is one of all ranks in the same order. Where they run different numbers of forward passes, `together` evens that out.

Legend: as in trainer.engine.port.
"""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.config.schema import Optimizer, Train
from trainer.engine.heartbeat import Heartbeat
from trainer.engine.port import Term, TokenScores, Work
from trainer.engine.sharded import all_scores
from trainer.engine.stateless import slopes_of
from trainer.errors import ConfigError, MismatchError, ModelError
from trainer.learn.logprobs import TokenScorer, in_chunks
from trainer.learn.optimizer import MOMENTS, check_offload
from trainer.learn.plain import PlainEngine
from trainer.memory.lazy import skeleton
from trainer.policy.load import true_shape
from trainer.policy.policy import Policy

WHOLE_BELOW = 10_000  # elements of a tensor that stays whole on every rank: norms and biases
AGREES_WITHIN = 1e-4  # of a self-test's weights, relative; it is at 1e-6


def check_installed() -> None:
    """Refuse `memory.weights: zero3` where DeepSpeed is missing.

    Raises:
        ConfigError: it is.
    """
    if importlib.util.find_spec("deepspeed") is None:
        fix = "pip install 'tithe[deepspeed]' (with DS_BUILD_OPS=0 nothing is compiled), or set memory.weights: resident"
        raise ConfigError("train.memory.weights", "zero3", f"needs DeepSpeed, which is not installed here; {fix}")


def begin(device: torch.device, directory: Path) -> None:
    """Import DeepSpeed for a device, once a process.

    Args:
        device: on which weights compute.
        directory: of this run; what DeepSpeed compiles goes there. A lock left by a killed build would stop all later starts
            that share it, without a word.
    """
    check_installed()
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ["TORCH_EXTENSIONS_DIR"] = str(directory / "extensions" / platform.node())

    import deepspeed

    said = r"`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
    warnings.filterwarnings("ignore", said, FutureWarning)  # DeepSpeed calls them by their old names
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a minute of compiling, for inference only


def settings(train: Train, num_trained: int, dtype: str = "float32", whole_below: int = WHOLE_BELOW) -> dict[str, Any]:
    """Return DeepSpeed's configuration.

    Args:
        train: clipping, offload, prefetch.
        num_trained: elements that train.
        dtype: in which weights are made, while they are loaded.
        whole_below: elements of a tensor that is not cut.
    """
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_param_persistence_threshold": whole_below,
        "reduce_bucket_size": max(num_trained, 1),  # a buffer of that length is kept
    }
    if train.memory.prefetch == 0:
        zero["stage3_prefetch_bucket_size"] = 0
    if train.optimizer.offload == "cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # their number differs from step to step: the boundary is set by hand
        "gradient_clipping": train.optimizer.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": sys.maxsize,
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_optimization": zero,
    }


@contextmanager
def loading(train: Train, dtype: str, directory: Path) -> Iterator[None]:
    """Have models that transformers loads in this block cut into pieces, layer by layer; `begin` comes first.

    Args:
        train: the configuration of training.
        dtype: of the weights.
        directory: of the model; its class is imported before DeepSpeed wraps the constructors of tensors.
    """
    from transformers.integrations import HfDeepSpeedConfig

    skeleton(directory)
    held = HfDeepSpeedConfig(settings(train, 0, dtype))  # transformers keeps a weak reference
    yield
    del held


class Ranks:
    """The ranks of the default group, and sums over them."""

    def __init__(self) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()

    def total(self, values: Tensor) -> Tensor:
        """Return values added up over ranks."""
        dist.all_reduce(values)
        return values


class Tail(nn.Module):
    """A head that runs once a forward pass, in however many chunks: ranks that visit other modules wait for each other for ever.

    Args:
        head: whose weights these are.
        temperature: that of the sampling distribution.
    """

    def __init__(self, head: nn.Linear, temperature: float):
        super().__init__()
        self.weight, self.bias, self.temperature = head.weight, head.bias, temperature
        self.vocabulary = true_shape(head.weight)[0]

    def forward(self, hidden_TD: Tensor, ids_TK: Tensor, entropy: bool) -> Tensor:
        def head(hidden_TD: Tensor) -> Tensor:
            return nn.functional.linear(hidden_TD, self.weight, self.bias)

        return _flat(in_chunks(head, self.vocabulary, hidden_TD, ids_TK, self.temperature, entropy))


def _flat(scores: TokenScores) -> Tensor:
    """Return scores as one tensor: the number of a module's outputs decides how often its hooks run."""
    logprobs = scores.logprobs_TK.flatten()
    return logprobs if scores.entropy_T is None else torch.cat([logprobs, scores.entropy_T])


class Inside(nn.Module):
    """Calls functions over modules as forward passes of one module, for DeepSpeed's hooks to see begin and end."""

    def __init__(self, *modules: nn.Module):
        super().__init__()
        self.inner = nn.ModuleList(modules)

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


class Zero3Optimizer:
    """AdamW over pieces, with the face of `PolicyOptimizer`.

    Args:
        module: computes; some of its weights train.
        trainable: those, by stable name.
        train: AdamW's settings and DeepSpeed's.
        whole_below: as in `settings`.

    Raises:
        ConfigError: an offload that is not worth it.
    """

    def __init__(self, module: nn.Module, trainable: Mapping[str, nn.Parameter], train: Train, whole_below: int = WHOLE_BELOW):
        import deepspeed

        self.stepped, self.ranks = dict(trainable), Ranks()
        num_trained = sum(parameter.numel() for parameter in trainable.values())  # not cut yet
        check_offload(num_trained, train.optimizer)
        self.adamw = _adamw(list(trainable.values()), train.optimizer)
        config = settings(train, num_trained, whole_below=whole_below)
        self.engine, *_ = deepspeed.initialize(model=module, optimizer=self.adamw, config=config)
        self.blank: Callable[[], Tensor] = lambda: torch.zeros(())  # a loss of zero, from a forward pass over the module
        self.has_state = False
        self._norms: Tensor | None = None

    def restart(self) -> None:
        """Forget AdamW's moments; the weights stay."""
        self.adamw.state.clear()
        self.has_state = False

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add a loss's gradient to those of this optimizer step.

        Args:
            loss: of this rank; those of all ranks add up.
            last: whether it is the last one.
        """
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * self.ranks.num_ranks)  # DeepSpeed takes the mean over ranks

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.engine.optimizer.zero_grad()

    def norms(self) -> Tensor:
        """Return the 2-norm of each weight's gradient, the same on all ranks, in the order of `stepped`."""
        from deepspeed.utils import safe_get_local_grad

        pieces = [safe_get_local_grad(parameter) for parameter in self.stepped.values()]
        squares = torch.stack([piece.double().square().sum() for piece in pieces])
        self._norms = self.ranks.total(squares).sqrt()
        return self._norms

    def grad_norm(self) -> Tensor:
        """Return the global 2-norm of the gradients, a scalar tensor; not finite when any of them is not."""
        return torch.linalg.vector_norm(self.norms())

    def first_bad_gradient(self) -> str | None:
        """Return the name of the first tensor whose gradient is not finite."""
        assert self._norms is not None
        bad = (~torch.isfinite(self._norms)).nonzero()
        return list(self.stepped)[int(bad[0])] if len(bad) else None

    def step(self, rate: float, norm: Tensor) -> None:
        """Clip the gradients to the global norm, apply them at a learning rate, forget them."""
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.engine.step()
        self.has_state = True

    def weights(self) -> dict[str, Tensor]:
        """Return whole weights."""
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in self.stepped.items()}

    def state(self) -> dict[str, Tensor]:
        """Return AdamW's state, whole, as tensors named `<weight>/<quantity>`."""
        from deepspeed.utils import safe_get_full_optimizer_state

        if not self.has_state:
            return {}
        count = next(iter(self.adamw.state.values()))["step"]
        found = {}
        for name, parameter in self.stepped.items():
            found[f"{name}/step"] = count.clone()
            for moment in MOMENTS:
                found[f"{name}/{moment}"] = safe_get_full_optimizer_state(parameter, moment).clone()
        return found

    def load(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Take weights and AdamW's state from a checkpoint."""
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        assert weights.keys() == self.stepped.keys(), "a checkpoint with other weights"
        for name, parameter in self.stepped.items():
            safe_set_local_fp32_param(parameter, self._piece(parameter, weights[name]))
        self.restart()
        self.zero_grad()
        self.backward(self.blank(), last=True)
        self.step(0.0, torch.zeros(()))  # moves nothing: the pieces that compute take over the weights, and a state comes to be
        if not state:
            self.restart()
            return
        for name, parameter in self.stepped.items():
            for moment in MOMENTS:
                safe_set_local_optimizer_state(parameter, self._piece(parameter, state[f"{name}/{moment}"]), moment)
        count = state[f"{next(iter(self.stepped))}/step"]
        for kept in self.adamw.state.values():
            kept["step"].copy_(count)

    def _piece(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """Return this rank's piece of a tensor, cut as a parameter is; the `safe_set_full_*` fail where pieces are padded."""
        length = math.ceil(whole.numel() / self.ranks.num_ranks)
        padded = nn.functional.pad(whole.flatten(), (0, length * self.ranks.num_ranks - whole.numel()))
        return padded[self.ranks.rank * length :][:length].to(parameter.device)


def _adamw(trainable: Sequence[nn.Parameter], optimizer: Optimizer) -> torch.optim.AdamW:
    """Return AdamW as `PolicyOptimizer` has it; weight decay is for matrices."""
    matrices = {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": optimizer.weight_decay}
    vectors = {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0}
    groups = [group for group in (matrices, vectors) if group["params"]]
    return torch.optim.AdamW(groups, lr=optimizer.learning_rate, betas=optimizer.betas, eps=optimizer.eps, fused=True)


def _refuse_lists_of_experts(model: nn.Module) -> None:
    """Refuse a model that would visit other modules on every rank.

    Raises:
        ModelError: its experts are modules, of which a forward pass visits those that its tokens are sent to.
    """
    for name, module in model.named_modules():
        if isinstance(getattr(module, "experts", None), nn.ModuleList):
            raise ModelError(
                f"{name}.experts of this model are modules of their own, which ranks would gather in different orders and so "
                "wait for each other; set train.memory.weights: tiered, or load a model whose experts are one stack of weights"
            )


class Zero3Engine(PlainEngine):
    """As `PlainEngine`, over a backbone in pieces; each rank runs every `num_ranks`-th forward pass.

    Args:
        policy: with an adapter, on a backbone that was loaded inside `loading`.
        train: the configuration of training.
        whole_below: as in `settings`.
    """

    def __init__(self, policy: Policy, train: Train, whole_below: int = WHOLE_BELOW):
        assert policy.adapter is not None
        _refuse_lists_of_experts(policy.model)
        self.device, self.model = policy.device, policy.model
        head: Any = policy.model.get_output_embeddings()
        self.tail = Tail(head, train.sampling.temperature) if type(head) is nn.Linear else None
        inside = Inside(policy.model, *filter(None, [self.tail]))
        self.optimizer: Any = Zero3Optimizer(inside, policy.trainable, train, whole_below)
        self.optimizer.blank = self._blank
        self.ranks, self.inside = self.optimizer.ranks, self.optimizer.engine
        self.scorer = TokenScorer(policy.model, train.sampling.temperature)
        self.heartbeat = Heartbeat(train.heartbeat.factor, train.heartbeat.warmup_steps, train.optimizer.max_grad_norm)
        ids = torch.zeros((1, 2), dtype=torch.int64, device=self.device)
        self.nothing = Work(ids, ids[0, :1], ids[:, :1])  # for a rank that has nothing to run while others have

    def _blank(self) -> Tensor:
        return (self._run(self.nothing).logprobs_TK * 0.0).sum()

    def _run(self, work: Work) -> TokenScores:
        def scores() -> Tensor:
            if self.tail is not None and self.scorer.head_is_last:
                hidden_TD = self.scorer.hidden(work.input_ids_BS, work.where_T)
                scored: Tensor = self.tail(hidden_TD, work.ids_TK, work.entropy)
                return scored
            return _flat(self.scorer.score(work.input_ids_BS, work.where_T, work.ids_TK, work.entropy))

        self.inside.module.training = self.model.training
        flat = self.inside(scores)
        logprobs, entropy = flat.split([work.ids_TK.numel(), len(flat) - work.ids_TK.numel()])
        return TokenScores(logprobs.view(work.ids_TK.shape), entropy if work.entropy else None)

    @torch.no_grad()
    def score(self, works: Sequence[Work]) -> list[TokenScores]:
        if not works:
            return []
        mine = list(works[self.ranks.rank :: self.ranks.num_ranks])
        rounds = math.ceil(len(works) / self.ranks.num_ranks)
        found = [self._run(work) for work in [*mine, *[self.nothing] * (rounds - len(mine))]]
        return all_scores(works, found, self.ranks)

    def accumulate(self, terms: Sequence[Term]) -> Tensor:
        self.optimizer.zero_grad()
        total, count = 0.0, self.ranks.num_ranks
        for start in range(0, max(len(terms), 1), count):
            some = terms[start : start + count]
            works = [term.work for term in some]
            has_one = self.ranks.rank < len(works)
            found = self._run(works[self.ranks.rank] if has_one else self.nothing)
            with torch.no_grad():
                known = all_scores(works, [TokenScores(found.logprobs_TK, found.entropy_T)], self.ranks)
            part, slopes = slopes_of(some, known)
            total += part
            surrogate = (found.logprobs_TK * (slopes[self.ranks.rank].logprobs_TK if has_one else 0.0)).sum()
            entropy_T = slopes[self.ranks.rank].entropy_T if has_one else None
            if found.entropy_T is not None and entropy_T is not None:
                surrogate = surrogate + (found.entropy_T * entropy_T).sum()
            self.optimizer.backward(surrogate, last=start + count >= len(terms))
        return torch.tensor(total, device=self.device)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let ranks run different numbers of forward passes inside the block; who is done runs along until all are."""

        def announce(*_: Any) -> None:
            self._others(1.0)

        handle = self.model.register_forward_pre_hook(announce, prepend=True)
        try:
            yield
        finally:
            handle.remove()
        while self._others(0.0) > 0:
            with torch.no_grad():
                self.model(input_ids=self.nothing.input_ids_BS, use_cache=False)

    def _others(self, mine: float) -> float:
        return float(self.ranks.total(torch.full((1,), mine, device=self.device)))

    def whole(self) -> AbstractContextManager[None]:
        """Have the adapter's weights whole for the span of a block, on all ranks."""
        import deepspeed

        gathered: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(list(self.optimizer.stepped.values()))
        return gathered


# -- the known failures are silent --------------------------------------------------------------------------------------


def self_test(train: Train, device: torch.device) -> None:
    """Run a few optimizer steps of a tiny model, one of them abandoned, one reloaded, and hold them to plain AdamW.

    Args:
        train: AdamW's settings and DeepSpeed's.
        device: on which weights compute.

    Raises:
        MismatchError: they differ, on any rank; all ranks raise it.
    """
    from trainer.learn.optimizer import PolicyOptimizer

    ranks, config = Ranks(), train.optimizer.model_copy(update={"offload_small": True})
    alone = PolicyOptimizer(_trainable(expected := _tiny(device)), config.model_copy(update={"offload": "none"}))
    tested = train.model_copy(update={"optimizer": config})
    shared = Zero3Optimizer(Inside(found := _tiny(device)), _trainable(found), tested, whole_below=0)
    shared.blank = lambda: shared.engine(lambda: _output(found, 0) * 0.0)
    apart = 0.0
    for step in range(4):
        alone.zero_grad()
        shared.zero_grad()
        for part in range(2):
            for rank in range(ranks.num_ranks):
                _output(expected, _seed_of(step, part, rank)).backward()
            shared.backward(shared.engine(partial(_output, found, _seed_of(step, part, ranks.rank))), last=part == 1)
        norms = alone.grad_norm(), shared.grad_norm()
        apart = max(apart, _apart(*norms))
        if step == 1:  # abandoned
            continue
        alone.step(train.optimizer.learning_rate, norms[0])
        shared.step(train.optimizer.learning_rate, norms[1])
        if step == 2:
            weights, state = shared.weights(), shared.state()
            shared.restart()
            shared.load(weights, state)
    pairs = zip(alone.weights().values(), shared.weights().values(), strict=True)
    apart = max([apart, *(_apart(*pair) for pair in pairs)])
    shared.engine.destroy()
    failed = torch.tensor([0.0 if apart <= AGREES_WITHIN else 1.0], device=device)  # 1 where it is not finite, too
    if float(ranks.total(failed)) > 0:
        import deepspeed

        raise MismatchError(
            f"DeepSpeed {deepspeed.__version__} failed its self-test: after three steps of a tiny model over {ranks.num_ranks} "
            f"ranks it is {apart:.2g} from plain AdamW (at most {AGREES_WITHIN:g}); nothing was trained. Install the version "
            "that constraints.txt names, or set train.memory.weights: resident"
        )


def _seed_of(step: int, part: int, rank: int) -> int:
    return 1 + step + 10 * part + 100 * rank


def _tiny(device: torch.device) -> nn.Module:
    """Return a model with frozen and trained weights of odd sizes, the same everywhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    return model.to(device)


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _output(model: nn.Module, seed: int) -> Tensor:
    """Return a loss over inputs that a seed draws."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(4, 6, generator=generator).to(next(model.parameters()).device)
    loss: Tensor = model(inputs).square().sum()
    return loss


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-6))
