"""Collectives with gradients, for ranks that compute one pass together.

`copied` and `summed` are Megatron's f and g (arXiv 1909.08053, section 3): where one goes forward, the other goes back.
"""

from typing import Any

import torch
import torch.distributed as dist


def copied(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The value as it is, for ranks that each use it for a part; their gradients are summed."""
    result: torch.Tensor = _Copied.apply(value, group)  # type: ignore[no-untyped-call]
    return result


def summed(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of all ranks' values, which all go on with alike; so each one's gradient is the sum's."""
    result: torch.Tensor = _Summed.apply(value, group)  # type: ignore[no-untyped-call]
    return result


def joined(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Join all ranks' parts of the last dimension; all ranks go on with the same result."""
    result: torch.Tensor = _Joined.apply(part, group)  # type: ignore[no-untyped-call]
    return result


def part_of(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of the last dimension of what all have."""
    result: torch.Tensor = _PartOf.apply(value, group)  # type: ignore[no-untyped-call]
    return result


def to_heads(part_NHD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange a part of the tokens with all heads for all tokens with a part of the heads."""
    result: torch.Tensor = _Exchanged.apply(part_NHD, group, True)  # type: ignore[no-untyped-call]
    return result


def to_tokens(part_NHD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The way back."""
    result: torch.Tensor = _Exchanged.apply(part_NHD, group, False)  # type: ignore[no-untyped-call]
    return result


def sent_to(rows: torch.Tensor, out: list[int], back: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Send rows to other ranks: `out` are the numbers of rows for each rank, in order; `back`: those from each rank."""
    result: torch.Tensor = _Sent.apply(rows, out, back, group)  # type: ignore[no-untyped-call]
    return result


def handed_over(rows: torch.Tensor, out: list[int], back: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """The same; no gradient."""
    received = rows.new_empty(sum(back), *rows.shape[1:])
    dist.all_to_all_single(received, rows.detach().contiguous(), back, out, group)
    return received


def all_reduced(value: torch.Tensor, group: dist.ProcessGroup, how: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """A new tensor; no gradient."""
    result = value.detach().clone().contiguous()
    dist.all_reduce(result, how, group)
    return result


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return all_reduced(gradient, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return all_reduced(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _joined(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _own_part(gradient, ctx.group), None


class _PartOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _own_part(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _joined(gradient, ctx.group), None


def _joined(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group)
    return torch.cat(parts, -1)


def _own_part(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return value.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)].contiguous()


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part_NHD: torch.Tensor, group: dist.ProcessGroup, heads: bool) -> torch.Tensor:
        ctx.group, ctx.heads = group, heads
        return _exchanged(part_NHD, group, heads)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _exchanged(gradient, ctx.group, not ctx.heads), None, None


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, out: list[int], back: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.out, ctx.back, ctx.group = out, back, group
        return handed_over(rows, out, back, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return handed_over(gradient, ctx.back, ctx.out, ctx.group), None, None, None


def _exchanged(part_NHD: torch.Tensor, group: dist.ProcessGroup, heads: bool) -> torch.Tensor:
    size = dist.get_world_size(group)
    tokens, width, *rest = part_NHD.shape
    if heads:
        sent = part_NHD.view(tokens, size, width // size, *rest).transpose(0, 1).contiguous()
    else:
        sent = part_NHD.reshape(size, tokens // size, width, *rest).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    if heads:
        return received.flatten(0, 1)
    return received.transpose(0, 1).flatten(1, 2)
