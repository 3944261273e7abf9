"""Optimizers, and the float32 weights that they update.

Decision: parameters in bfloat16 have a float32 copy, the master weights. Gradients are added up there, the optimizer
updates them, and the result is rounded to bfloat16. In bfloat16 itself, updates of less than 1/256 of a weight would be
lost.

Decision: Muon takes the matrices inside the layers, AdamW the rest (embeddings, head, vectors), as its author advises
(kellerjordan.github.io/posts/muon). Its updates are scaled to AdamW's size, so both share a learning rate
(arXiv 2502.16982, eq. 4).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rollouts_core.training.checkpoint import whole
from rollouts_core.training.schedule import Rate
from rollouts_core.training.shard_files import local

OptimizerName = Literal["adamw", "muon"]
OwnOptimizer = Callable[[list[torch.Tensor], float], torch.optim.Optimizer]
"""One's own: the float32 parameters and the learning rate in, the optimizer out."""


def create_adamw_optimizer(
    parameters: Mapping[str, torch.Tensor], learning_rate: float, weight_decay: float = 0.0
) -> torch.optim.AdamW:
    """AdamW with torch's betas (0.9, 0.999); vectors (norms, biases) are not decayed."""
    groups = []
    for alike in by_mesh(parameters.values()):
        matrices = [value for value in alike if value.ndim >= 2]
        vectors = [value for value in alike if value.ndim < 2]
        groups += [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=learning_rate, fused=True)


def clip_gradients(parameters: Sequence[torch.Tensor], largest: float) -> torch.Tensor:
    """Scale gradients, in place, so that their norm over all ranks is `largest` at most; gives the norm before."""
    alike = by_mesh(value for value in parameters if value.grad is not None)
    if len(alike) < 2:
        return whole(nn.utils.clip_grad_norm_(parameters, largest))
    norms = [whole(nn.utils.get_total_norm([value.grad for value in of if value.grad is not None])) for of in alike]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    for value in parameters:
        if value.grad is not None:
            local(value.grad).mul_(factor)
    return norm


def by_mesh(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Apart where they are shared by other ranks: torch's operators on many tensors want one mesh."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for value in parameters:
        groups.setdefault(value.device_mesh if isinstance(value, DTensor) else None, []).append(value)
    return list(groups.values())


def create_optimizers(
    name: OptimizerName | OwnOptimizer,
    parameters: Mapping[str, torch.Tensor],
    learning_rate: float,
    weight_decay: float = 0.0,
) -> list[torch.optim.Optimizer]:
    if callable(name):
        return [name(list(parameters.values()), learning_rate)]
    if name == "adamw":
        return [create_adamw_optimizer(parameters, learning_rate, weight_decay)]
    inner = {path: value for path, value in parameters.items() if value.ndim == 2 and ".layers." in path}
    rest = {path: value for path, value in parameters.items() if path not in inner}
    muon = torch.optim.Muon(
        list(inner.values()), lr=learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, create_adamw_optimizer(rest, learning_rate, weight_decay)]


def set_rate(optimizers: Sequence[torch.optim.Optimizer], learning_rate: float, rate: Rate, step: int) -> float:
    """Give all groups the learning rate of a step; returns it."""
    now = learning_rate * rate(step)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = now
    return now


class MasterWeights:
    """The weights that an optimizer changes: float32 parameters themselves, and float32 copies of the others.

    `offloaded`: copies in the host's memory, where gradients are added up and the optimizer steps.
    """

    def __init__(self, module: nn.Module, offloaded: bool = False) -> None:
        def master(value: torch.Tensor) -> torch.Tensor:
            if offloaded:
                return value.detach().to("cpu", torch.float32, copy=True).requires_grad_()
            return value if value.dtype == torch.float32 else value.detach().float().requires_grad_()

        named = module.named_parameters()
        self._pairs = {name: (value, master(value)) for name, value in named if value.requires_grad}

    @property
    def named(self) -> dict[str, torch.Tensor]:
        return {name: master for name, (_, master) in self._pairs.items()}

    def take_gradients(self) -> None:
        """Add what the parameters' gradients hold to the copies'."""
        for parameter, master in self._copied():
            if parameter.grad is not None:
                gradient = parameter.grad.to(master.device, torch.float32)
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    @torch.no_grad()
    def give_back(self) -> None:
        """Round the copies to the parameters."""
        for parameter, master in self._copied():
            local(parameter).copy_(local(master))

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the parameters' values, which have been replaced."""
        for parameter, master in self._copied():
            local(master).copy_(local(parameter))

    def _copied(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((parameter, master) for parameter, master in self._pairs.values() if parameter is not master)
