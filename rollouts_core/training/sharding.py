"""A policy in shards (FSDP2): it is cut before it has weights, then filled, weight by weight.

Decision: no rank ever holds the whole model. Its modules are made on the meta device, and each rank reads or draws the
weights of its shards; see `origins.py`. Besides its shards a rank holds one weight at a time.

Parameters that are trained are float32 shards, and are gathered in the type of the computation; gradients are reduced
in float32. Those of a frozen policy are kept in the type of the computation.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from rollouts_core.config import ParallelConfig
from rollouts_core.errors import BadInput
from rollouts_core.inference.devices import allocate
from rollouts_core.inference.routing import experts_of
from rollouts_core.inference.weights import stored
from rollouts_core.training.context_parallel import Context
from rollouts_core.training.expert_parallel import problems_with_experts, share_experts
from rollouts_core.training.lora import drawn_adapters
from rollouts_core.training.models import DTYPES
from rollouts_core.training.origins import Origin, Readable
from rollouts_core.training.policy import Layout, Policy
from rollouts_core.training.ranks import Ranks
from rollouts_core.training.shard_files import block_of, local, take_from_first
from rollouts_core.training.tensor_parallel import cut, problems_with_cut


def shard(policy: Policy, ranks: Ranks, dtype: torch.dtype) -> None:
    """Cut the policy's parameters over the ranks, in place; `dtype` is that of the computation.

    A policy that has weights gets rank 0's. Raises `BadInput` where its layers or heads can't be cut so.
    """
    check_layout(policy.model, ranks)
    with torch.no_grad():
        for value in policy.parameters():
            if not value.is_meta:
                dist.broadcast(value, 0)
    sizes = (ranks.groups * ranks.context // ranks.expert, ranks.expert, ranks.tensor)
    meshes = init_device_mesh(ranks.device.type, sizes, mesh_dim_names=("outer", "expert", "tensor"))
    mesh = meshes["outer", "expert"]._flatten("shard")
    vocabulary = cut(policy.model, meshes["tensor"]) if ranks.tensor > 1 else False
    policy.share(Layout(_context(ranks), meshes["tensor"].get_group() if vocabulary else None))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for experts in share_experts(policy.model, meshes) if ranks.expert * ranks.tensor > 1 else ():
        as_they_are = replace(precision, cast_forward_inputs=False)
        fully_shard(experts, mesh=meshes["outer"], mp_policy=as_they_are, shard_placement_fn=_evenly(sizes[0]))
    layers = set(policy.model._no_split_modules or ())
    for module in [module for module in policy.modules() if type(module).__name__ in layers]:
        fully_shard(module, mesh=mesh, mp_policy=precision)
    trained = any(value.requires_grad for value in policy.parameters())
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=not trained)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other


def _evenly(ranks: int) -> Callable[[torch.Tensor], Shard | None]:
    """How a weight of some experts is cut: between experts, or inside each where there are not enough of them."""

    def dimension(weight: torch.Tensor) -> Shard | None:
        inside = local(weight).shape[0] % ranks and weight.ndim > 1 and weight.shape[1] % ranks == 0
        return Shard(1) if inside else None

    return dimension


def check_layout(model: Any, ranks: Ranks) -> None:
    """Raises `BadInput` where the ranks can't share a model's passes as they are to."""
    config = model.config
    heads = config.num_attention_heads
    shared = ParallelConfig(context=ranks.context, tensor=ranks.tensor)
    problems = shared.problems_with(heads, getattr(config, "num_key_value_heads", None) or heads)
    if ranks.tensor > 1:
        cannot = problems_with_cut(model, ranks.tensor)
        problems += [f"backend.parallel.tensor: {problem}" for problem in cannot]
    if ranks.expert > 1 or (ranks.tensor > 1 and any(experts_of(model))):
        cannot = problems_with_experts(model, ranks.expert * ranks.tensor)
        problems += [f"backend.parallel.expert: {problem}" for problem in cannot]
    if problems:
        raise BadInput(problems)


def _context(ranks: Ranks) -> Context | None:
    """The context-parallel group of this rank; all ranks create all groups."""
    if ranks.context == 1:
        return None
    found = None
    for group in range(ranks.groups):
        for place in range(ranks.tensor):
            first = group * ranks.together + place
            members = list(range(first, first + ranks.together, ranks.tensor))
            made = dist.new_group(members)
            if ranks.rank in members:
                found = Context(made, members.index(ranks.rank), ranks.context)
    return found


def sharded_policy(origin: Origin, temperature: float, ranks: Ranks) -> Policy:
    """A frozen policy, of which each rank has a shard; all ranks ask for it."""
    policy = Policy(origin.blank().requires_grad_(False), temperature, entropy=False).eval()
    shard(policy, ranks, DTYPES[origin.dtype])
    fill(policy, origin, ranks)
    return policy


@torch.no_grad()
def fill(policy: Policy, origin: Origin, ranks: Ranks) -> None:
    """Give a blank policy, cut over the ranks, its first weights: the origin's, adapters' and the critic's."""
    allocate(policy, ranks.device)
    own = stored(policy.model) | dict(policy.model.named_parameters())
    dtype = DTYPES[origin.dtype]
    everywhere, weights = origin.weights()
    for name, weight in weights:
        if everywhere:
            _take(own[name], weight, dtype)
        else:
            _receive(own[name], weight, dtype)
    for name, adapter in drawn_adapters(policy.model):
        _take(own[name], adapter, dtype)
    for value in policy.value_head.parameters() if policy.value_head is not None else ():
        value.zero_()


def _take(own: torch.Tensor, weight: Readable, dtype: torch.dtype) -> None:
    """Copy what `own`, a shard or a whole tensor, has of a weight. `dtype`: what the model's weights are rounded to."""
    local(own).copy_(weight[block_of(own)].to(dtype))


def _receive(own: torch.Tensor, weight: Readable, dtype: torch.dtype) -> None:
    """The same, of a weight that rank 0 has."""
    given = torch.empty(own.shape, dtype=dtype, device=own.device)
    if dist.get_rank() == 0:
        given.copy_(weight[tuple(slice(0, size) for size in own.shape)])
    take_from_first(own, given)
