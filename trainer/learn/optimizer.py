"""AdamW over the weights that train: schedule of the learning rate, float32 masters of bfloat16 weights, state as tensors.

Weight decay applies to matrices only, not to norms, biases and other vectors. bfloat16 weights are stepped through a float32
copy: at a learning rate of 1e-6 rounding to bfloat16 would lose the step. Gradients of such weights add up in float32.

*Offload.* The two moments can lie in host memory or in files; then weights are stepped one after the other, each with its moments
on the device for that moment. The arithmetic is the same, so the bits are.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from trainer.config.schema import Optimizer
from trainer.errors import ConfigError
from trainer.files import disk_full_is_named

MOMENTS = ("exp_avg", "exp_avg_sq")
OFFLOAD_FROM = 500_000_000  # parameters; below, their state fits wherever they do


def learning_rate(update: int, total: int, config: Optimizer, peak: float) -> float:
    """Return the learning rate of an optimizer step.

    Linear from peak / warmup_steps to peak, then constant, or a cosine that reaches final_fraction * peak at the last update.

    Args:
        update: 0-based number of the optimizer step within its RL stage.
        total: optimizer steps of the RL stage.
        config: warm-up, schedule, final fraction.
        peak: the highest learning rate.
    """
    if update < config.warmup_steps:
        return peak * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak
    progress = min((update - config.warmup_steps) / max(total - 1 - config.warmup_steps, 1), 1.0)
    return peak * (config.final_fraction + (1 - config.final_fraction) * (1 + math.cos(math.pi * progress)) / 2)


def check_offload(num_parameters: int, config: Optimizer) -> None:
    """Refuse to move a state away that is too small for it to be worth anything.

    Raises:
        ConfigError: fewer than OFFLOAD_FROM parameters train, and it is not forced.
    """
    if config.offload != "none" and num_parameters < OFFLOAD_FROM and not config.offload_small:
        raise ConfigError(
            "train.optimizer.offload",
            config.offload,
            f"{num_parameters:,} parameters train, whose state takes {8 * num_parameters / 2**20:,.1f} MiB: moving it costs time "
            f"and saves next to nothing below {OFFLOAD_FROM:,}; set none, or train.optimizer.offload_small: true to do it anyway",
        )


class PolicyOptimizer:
    """Steps the trainable weights of a policy.

    Args:
        trainable: parameters by stable name.
        config: AdamW's settings.
        directory: for `offload: nvme`; made if it is not there.

    Raises:
        ConfigError: an offload that is not worth it.
    """

    def __init__(self, trainable: Mapping[str, torch.nn.Parameter], config: Optimizer, directory: Path | None = None):
        check_offload(sum(parameter.numel() for parameter in trainable.values()), config)
        assert directory is not None or config.offload != "nvme"
        self.config, self.directory = config, directory
        self.parameters = dict(trainable)
        self.stepped = {name: self._float32(parameter) for name, parameter in self.parameters.items()}
        self.masters = {name: p for name, p in self.stepped.items() if p is not self.parameters[name]}
        for name, master in self.masters.items():
            self.parameters[name].register_post_accumulate_grad_hook(_add_to(master))
        self.restart()

    def restart(self) -> None:
        """Forget AdamW's moments; the weights stay."""
        matrices = {"params": [p for p in self.stepped.values() if p.ndim >= 2], "weight_decay": self.config.weight_decay}
        vectors = {"params": [p for p in self.stepped.values() if p.ndim < 2], "weight_decay": 0.0}
        groups = [group for group in (matrices, vectors) if group["params"]]
        rate, betas, eps = self.config.learning_rate, self.config.betas, self.config.eps
        self.adamw = torch.optim.AdamW(groups, lr=rate, betas=betas, eps=eps, fused=True)

    def _away(self, name: str, quantity: str, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape in host memory, or in a file."""
        if self.config.offload == "cpu":
            return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
        assert self.directory is not None
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{list(self.stepped).index(name):06d}.{quantity}"
        with disk_full_is_named(path), open(path, "wb") as file:
            os.posix_fallocate(
                file.fileno(), 0, like.numel() * like.element_size()
            )  # a full disk is met here, not in a page fault
        return torch.from_file(str(path), shared=True, size=like.numel(), dtype=like.dtype).view(like.shape)

    def _step_offloaded(self) -> None:
        """Step one weight after the other, with its moments on its device for that moment."""
        gradients = {name: parameter.grad for name, parameter in self.stepped.items()}
        for parameter in self.stepped.values():
            parameter.grad = None
        for name, parameter in self.stepped.items():
            state = self.adamw.state[parameter]
            away = {quantity: state[quantity] for quantity in MOMENTS if quantity in state}
            for quantity, tensor in away.items():
                state[quantity] = tensor.to(parameter.device, copy=True)
            parameter.grad = gradients[name]
            self.adamw.step()
            parameter.grad = None
            for quantity in MOMENTS:
                moved = away[quantity] if quantity in away else self._away(name, quantity, state[quantity])
                state[quantity] = moved.copy_(state[quantity])

    @staticmethod
    def _float32(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        return parameter if parameter.dtype == torch.float32 else torch.nn.Parameter(parameter.detach().float())

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in (*self.parameters.values(), *self.stepped.values()):
            parameter.grad = None

    def grad_norm(self) -> torch.Tensor:
        """Return the global 2-norm of the gradients, a scalar tensor; not finite when any of them is not."""
        for parameter in self.stepped.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return torch.nn.utils.get_total_norm([p.grad for p in self.stepped.values() if p.grad is not None])

    def norms(self) -> torch.Tensor:
        """Return the 2-norm of each weight's gradient, in the order of `stepped`; `grad_norm` comes first."""
        return torch.stack([torch.linalg.vector_norm(p.grad) for p in self.stepped.values() if p.grad is not None])

    def first_bad_gradient(self) -> str | None:
        """Return the name of the first tensor whose gradient is not finite."""
        for name, parameter in self.stepped.items():
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                return name
        return None

    def step(self, rate: float, norm: torch.Tensor) -> None:
        """Clip the gradients to the global norm, apply them at a learning rate, forget them."""
        torch.nn.utils.clip_grads_with_norm_(list(self.stepped.values()), self.config.max_grad_norm, norm)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        if self.config.offload == "none":
            self.adamw.step()
        else:
            self._step_offloaded()
        with torch.no_grad():
            for name, master in self.masters.items():
                self.parameters[name].copy_(master)
        self.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint keeps of the weights: the float32 masters where there are any."""
        return {name: parameter.detach() for name, parameter in self.stepped.items()}

    def state(self) -> dict[str, torch.Tensor]:
        """Return AdamW's state as tensors named `<weight>/<quantity>`."""
        named = {id(parameter): name for name, parameter in self.stepped.items()}
        return {
            f"{named[id(parameter)]}/{key}": value
            for parameter, values in self.adamw.state.items()
            for key, value in values.items()
        }

    def load(self, weights: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
        """Take weights and AdamW's state from a checkpoint."""
        assert weights.keys() == self.stepped.keys(), "a checkpoint with other weights"
        with torch.no_grad():
            for name, parameter in self.stepped.items():
                parameter.copy_(weights[name])
                self.parameters[name].copy_(parameter)
        self.restart()
        for key, value in state.items():
            name, _, quantity = key.rpartition("/")
            parameter = self.stepped[name]
            if self.config.offload != "none" and quantity in MOMENTS:
                self.adamw.state[parameter][quantity] = self._away(name, quantity, value).copy_(value)
            else:
                self.adamw.state[parameter][quantity] = value.to(parameter.device, copy=True)


def _add_to(master: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    return hook
