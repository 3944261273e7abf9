"""The experts of a mixture's layers, distributed among ranks: each rank has whole experts (GShard, arXiv 2006.16668).

Decision: an expert's matrices stay whole, and a token goes through as many experts as on one device. Ranks that compute
other passes send each other the tokens that chose their experts, and get back the outputs. Ranks that compute the same
tokens (`tensor_parallel.py`) send nothing: each computes the tokens that chose its experts, and outputs are summed.

Decision: outputs are put in the order of a token's choices before they are added up. So the sum has the same bits for
any distribution of the experts, and on a GPU in every run.

Legend: N tokens, K experts that each chooses, P pairs of the two, E hidden size.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.func import functional_call

from rollouts_core.inference.routing import experts_of
from rollouts_core.training.collectives import copied, handed_over, sent_to, summed
from rollouts_core.training.shard_files import local


class Sharing(NamedTuple):
    """The distribution of a layer's experts among ranks."""

    own: int
    """The number of experts of each rank."""
    ranks: int
    """Ranks with other tokens."""
    others: dist.ProcessGroup
    place: int
    """This rank's number, among those with the same tokens."""
    alike: int
    """Ranks with the same tokens."""
    same: dist.ProcessGroup


def problems_with_experts(model: Any, ranks: int) -> list[str]:
    """Reasons why a model's experts can't be distributed among so many ranks; empty if they can."""
    kind, found = model.config.model_type, list(experts_of(model))
    if not found:
        return [f"{kind} has no experts that transformers has a plan for"]
    problems = set()
    for _, module in found:
        if module.num_experts % ranks:
            problems.add(f"{ranks} ranks do not divide the {module.num_experts} experts of {kind}")
        for name, value in module.named_parameters(recurse=False):
            if value.shape[0] != module.num_experts:
                problems.add(f"{name} of {type(module).__name__} is not a matrix for each expert")
    return sorted(problems)


def share_experts(model: Any, mesh: DeviceMesh) -> list[nn.Module]:
    """Give each rank of `mesh`, whose dimensions are "expert" and "tensor" among others, its part of the experts, in
    place. Gives the modules that hold them, whose weights are DTensors now."""
    both = mesh["expert", "tensor"]._flatten("experts")
    others, same = mesh["expert"], mesh["tensor"]
    found = [module for _, module in experts_of(model)]
    for module in found:
        for name, value in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(value.detach(), both, [Shard(0)])
            module.register_parameter(name, nn.Parameter(part, requires_grad=value.requires_grad))
        own = module.num_experts // both.size()
        module.num_experts = own
        sharing = Sharing(own, others.size(), others.get_group(), same.get_local_rank(), same.size(), same.get_group())
        module.forward = partial(_shared_out, module, both.get_local_rank() * own, sharing)
    return found


def computed(module: nn.Module, weights: dict[str, torch.Tensor], *values: torch.Tensor) -> Any:
    """The output of the module's class with other weights."""
    named = {f"module.{name}": value for name, value in weights.items()}
    return functional_call(_Class(module), named, values)


class _Class(nn.Module):
    """A module without its hooks, and without what has taken the place of its `forward`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *values: torch.Tensor) -> Any:
        kind: Any = type(self.module)
        return kind.forward(self.module, *values)


def _shared_out(
    module: nn.Module,
    first: int,
    sharing: Sharing,
    hidden_NE: torch.Tensor,
    chosen_NK: torch.Tensor,
    weights_NK: torch.Tensor,
) -> torch.Tensor:
    if sharing.alike > 1:
        hidden_NE, weights_NK = copied(hidden_NE, sharing.same), copied(weights_NK, sharing.same)
    owner_P = chosen_NK.flatten() // sharing.own
    pairs = (owner_P % sharing.alike == sharing.place).nonzero()[:, 0]
    to = owner_P[pairs] // sharing.alike
    order = torch.argsort(to, stable=True)
    pairs = pairs[order]
    counts = [(to == rank).sum() for rank in range(sharing.ranks)]
    rows, experts = hidden_NE[pairs // chosen_NK.shape[1]], chosen_NK.flatten()[pairs]
    found = _from_owners(module, first, sharing, torch.stack(counts), rows, experts)
    found_PE = hidden_NE.new_zeros(len(owner_P), hidden_NE.shape[1]).index_put((pairs,), found)
    mixed_NE = (found_PE.view(*chosen_NK.shape, -1) * weights_NK[..., None]).sum(1).to(hidden_NE.dtype)
    return summed(mixed_NE, sharing.same) if sharing.alike > 1 else mixed_NE


def _from_owners(
    module: nn.Module, first: int, sharing: Sharing, counts: torch.Tensor, rows: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """`counts`: how many of the rows, which are in the ranks' order, go to each."""
    if sharing.ranks == 1:
        return _through(module, rows, experts - first)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=sharing.others)
    out, back = counts.tolist(), received.tolist()
    theirs = _through(
        module,
        sent_to(rows, out, back, sharing.others),
        handed_over(experts, out, back, sharing.others) - first,
    )
    return sent_to(theirs, back, out, sharing.others)


def _through(module: nn.Module, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """The output of each row's expert; all are experts of this rank."""
    weights = {name: local(value) for name, value in module.named_parameters()}
    if not len(rows):  # its weights need a gradient anyway, because all ranks add up gradients together
        return rows + sum(value.flatten()[0] * 0.0 for value in weights.values())
    found: torch.Tensor = computed(module, weights, rows, experts[:, None], rows.new_ones(len(rows), 1))
    return found
