"""Shards of ranks on several hosts, sent to rank 0, which writes them as one file.

Decision: tensor by tensor, in one order on all ranks, by a thread and a process group of their own. So training goes
on, and rank 0 holds a copy of its own shards and one whole tensor.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rollouts_core.training.backend import TrainFuture
from rollouts_core.training.tensor_file import write_tensors

Starts = tuple[int, ...]
Shard = tuple[torch.Tensor, Starts, tuple[int, ...]]
"""What a rank has of a tensor, where that begins, and the whole tensor's shape."""


def send_home(
    file: Path, state: Mapping[str, torch.Tensor], group: dist.ProcessGroup, finish: Callable[[], None]
) -> TrainFuture[None]:
    """Copy the shards now; rank 0 writes them to `file` and calls `finish` behind. All ranks call it together."""
    copied = {name: _own(value) for name, value in state.items()}
    thread = ThreadPoolExecutor(1)
    work = partial(_write, file, copied, group, finish) if dist.get_rank() == 0 else partial(_send, copied, group)
    sending = thread.submit(work)
    thread.shutdown(wait=False)
    return sending


def _own(value: torch.Tensor) -> Shard:
    if not isinstance(value, DTensor):
        return value.to("cpu", copy=True), (0,) * value.ndim, tuple(value.shape)
    _, starts = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return value.to_local().to("cpu", copy=True), tuple(starts), tuple(value.shape)


def _send(shards: Mapping[str, Shard], group: dist.ProcessGroup) -> None:
    for own, starts, _ in shards.values():
        dist.send(torch.tensor([*starts, *own.shape]), 0, group)
        if own.numel():
            dist.send(own.contiguous(), 0, group)


def _write(file: Path, shards: Mapping[str, Shard], group: dist.ProcessGroup, finish: Callable[[], None]) -> None:
    file.parent.mkdir()
    for _ in write_tensors(file, shards, _gathered(shards, group)):
        pass
    finish()


def _gathered(shards: Mapping[str, Shard], group: dist.ProcessGroup) -> Iterator[tuple[str, torch.Tensor]]:
    for name, (own, starts, shape) in shards.items():
        whole = torch.empty(shape, dtype=own.dtype)
        _place(whole, own, starts)
        for rank in range(1, dist.get_world_size()):
            told = torch.empty(2 * len(shape), dtype=torch.long)
            dist.recv(told, rank, group)
            theirs = torch.empty(told[len(shape) :].tolist(), dtype=own.dtype)
            if theirs.numel():
                dist.recv(theirs, rank, group)
                _place(whole, theirs, told[: len(shape)].tolist())
        yield name, whole


def _place(whole: torch.Tensor, part: torch.Tensor, starts: "Starts | list[int]") -> None:
    whole[tuple(slice(start, start + size) for start, size in zip(starts, part.shape, strict=True))] = part
