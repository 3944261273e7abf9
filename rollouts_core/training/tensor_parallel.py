"""A model whose layers are cut over ranks that compute each pass together (Megatron's tensor parallelism, arXiv
1909.08053), by the plan that transformers has for its family.

Decision: the cut weights are DTensors, which FSDP cuts once more and checkpoints know. Computation uses plain tensors,
which are exchanged in the two places where a layer needs it. Weights that no plan names are whole on each rank.

Decision: experts are not cut but distributed (`expert_parallel.py`).

    colwise    rows of a weight: each rank computes some of a layer's outputs
    rowwise    columns: each rank takes some of its inputs, and outputs are summed
    head, embeddings    a rank's rows of the vocabulary, where the ranks divide it

Some plans gather a colwise layer's outputs and split a rowwise layer's inputs again; what is between them is computed
whole.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from rollouts_core.errors import BadInput
from rollouts_core.inference.routing import PLANNED, planned_name
from rollouts_core.training.collectives import copied, joined, part_of, summed
from rollouts_core.training.expert_parallel import computed
from rollouts_core.training.shard_files import local


def problems_with_cut(model: Any, ranks: int) -> list[str]:
    """Reasons why a model can't be cut over so many ranks; empty if it can."""
    kind, cuts = model.config.model_type, list(_cuts(model))
    if not cuts:
        return [f"transformers has no plan to cut {kind}"]
    unknown = sorted({f"{name.rpartition('.')[2]} is cut {style}" for name, _, style in cuts if style not in _CUTS})
    sizes = {name: size for name, module, style in cuts if style in _CUTS for size in _cut_sizes(module, style)}
    uneven = sorted({f"{ranks} ranks do not divide the {size} of {name.rpartition('.')[2]}"
                     for name, size in sizes.items() if size % ranks})  # fmt: skip
    return [f"{kind}: {problem}, which is not computed here" for problem in unknown] + uneven


def cut(model: Any, mesh: DeviceMesh) -> bool:
    """Cut a model, in place, over the ranks of a mesh of one dimension. Gives whether the vocabulary is cut as well.

    Raises `BadInput` where that can't be done.
    """
    if problems := problems_with_cut(model, mesh.size()):
        raise BadInput([f"backend.parallel.tensor: {problem}" for problem in problems])
    for _, module, style in list(_cuts(model)):
        _CUTS[style](module, mesh)
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if len(head.weight) % mesh.size():
        return False
    tied = head.weight is embeddings.weight
    _shard(head, "weight", 0, mesh)
    if getattr(head, "bias", None) is not None:
        _shard(head, "bias", 0, mesh)
    if tied:
        embeddings.weight = head.weight
    else:
        _shard(embeddings, "weight", 0, mesh)
    embeddings.forward = partial(_embedded, embeddings, mesh.get_group())
    return True


def _cuts(model: Any) -> Iterator[tuple[str, nn.Module, str]]:
    """The modules that the plan names, with their names and how they are cut."""
    plan = model.config.base_model_tp_plan or {}
    experts = [name for name, style in plan.items() if style in PLANNED]
    for planned, style in plan.items():
        if "embed" in style or any(planned == name or planned.startswith(f"{name}.") for name in experts):
            continue
        pattern = re.compile(planned_name(planned, model))
        for name, module in model.named_modules():
            if pattern.fullmatch(name):
                yield name, module, style


def _cut_sizes(module: Any, style: str) -> list[int]:
    """The sizes that the number of ranks must divide."""
    if style == "replicated_with_grad_allreduce":
        return []
    weight = getattr(module, "base_layer", module).weight
    return [weight.shape[1 if style.startswith("rowwise") else 0]]


def _colwise(module: Any, mesh: DeviceMesh) -> None:
    if hasattr(module, "lora_A"):
        _colwise(module.base_layer, mesh)
        for part in module.lora_B.values():
            _colwise(part, mesh)
        return
    for name in ("weight", "bias"):
        if getattr(module, name, None) is not None:
            _shard(module, name, 0, mesh)
    module.forward = partial(_columns, module, mesh.get_group())


def _rowwise(module: Any, mesh: DeviceMesh) -> None:
    if hasattr(module, "lora_A"):
        _rowwise(module.base_layer, mesh)
        for part in module.lora_A.values():
            _rowwise(part, mesh)
        return
    _shard(module, "weight", 1, mesh)
    module.forward = partial(_rows, module, mesh.get_group())


def _gathered_colwise(module: Any, mesh: DeviceMesh) -> None:
    """Cut by columns and gather the outputs, if the next operation needs all of them (norms over all heads, or a matrix
    that joins the weights of several layers)."""
    _colwise(module, mesh)
    cut_forward, group = module.forward, mesh.get_group()
    module.forward = lambda value: joined(cut_forward(value), group)


def _split_rowwise(module: Any, mesh: DeviceMesh) -> None:
    _rowwise(module, mesh)
    cut_forward, group = module.forward, mesh.get_group()
    module.forward = lambda value: cut_forward(part_of(value, group))


def _replicated(module: Any, mesh: DeviceMesh) -> None:
    """Keep the module whole on each rank, which uses it for its part of the computation."""
    module.forward = partial(_used_for_a_part, module, mesh.get_group())


_CUTS: dict[str, Callable[[Any, DeviceMesh], None]] = {
    "colwise": _colwise,
    "rowwise": _rowwise,
    "colwise_gather_output": _gathered_colwise,
    "rowwise_split_input": _split_rowwise,
    "replicated_with_grad_allreduce": _replicated,
}


def _shard(module: nn.Module, name: str, dim: int, mesh: DeviceMesh) -> None:
    value = module.get_parameter(name)
    sharded = nn.Parameter(distribute_tensor(value.detach(), mesh, [Shard(dim)]), requires_grad=value.requires_grad)
    module.register_parameter(name, sharded)


def _columns(module: Any, group: dist.ProcessGroup, value: torch.Tensor) -> torch.Tensor:
    bias = None if module.bias is None else local(module.bias)
    return F.linear(copied(value, group), local(module.weight), bias)


def _rows(module: Any, group: dist.ProcessGroup, value: torch.Tensor) -> torch.Tensor:
    found = summed(F.linear(value, local(module.weight)), group)
    return found if module.bias is None else found + module.bias


def _embedded(module: Any, group: dist.ProcessGroup, tokens: torch.Tensor) -> torch.Tensor:
    weight = local(module.weight)
    first = dist.get_rank(group) * len(weight)
    places = tokens - first
    own = (places >= 0) & (places < len(weight))
    padding = None if module.padding_idx is None else module.padding_idx - first
    padding = padding if padding is not None and 0 <= padding < len(weight) else None
    found = summed(F.embedding(places.clamp(0, len(weight) - 1), weight, padding) * own[..., None], group)
    scale = getattr(module, "embed_scale", None)
    return found if scale is None else found * scale.to(found.dtype)


def _used_for_a_part(module: nn.Module, group: dist.ProcessGroup, value: torch.Tensor) -> Any:
    return computed(module, {name: copied(weight, group) for name, weight in module.named_parameters()}, value)
