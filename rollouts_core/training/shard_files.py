"""A training's state as ranks write and read it: safetensors files whose tensors are blocks of whole ones.

Decision: files are written tensor by tensor and read block by block, so that a checkpoint costs a rank a copy of its
own shards and no more. torch.distributed.checkpoint holds the tensors of a file and its bytes at once: three copies.

The files are of its format: what a tensor is a block of stands in the metadata, `DCP_SHARDING_INFO`; where nothing
does, tensors are whole. So either reads what the other wrote.

Decision: ranks on several hosts, which have no disk in common, send their shards to rank 0, which writes whole tensors.
All of it happens in a thread and a process group of its own, in one order on all ranks, while training goes on.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rollouts_core.errors import BadInput
from rollouts_core.training.backend import TrainFuture
from rollouts_core.training.tensor_file import write_tensors
from rollouts_core.training.weight_files import Block, Piece, StoredWeight, opened, shape_in

BLOCKS = "DCP_SHARDING_INFO"
MEND = "remove this checkpoint's directory, and training resumes from the one before it"


class Shard(NamedTuple):
    """A rank's part of a tensor."""

    own: torch.Tensor
    starts: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the whole tensor."""


def block_of(value: torch.Tensor) -> Block:
    """The block of the whole tensor that a shard holds; all of it for a whole tensor."""
    if not isinstance(value, DTensor):
        return tuple(slice(0, size) for size in value.shape)
    shape, starts = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))


def local(value: torch.Tensor) -> torch.Tensor:
    """A shard's own memory."""
    return value.to_local() if isinstance(value, DTensor) else value


def take_from_first(own: torch.Tensor, value: torch.Tensor) -> None:
    """Copy what `own`, a shard or a whole tensor, has of rank 0's value; every rank asks for it."""
    value = value.detach().to(own.device, own.dtype).contiguous()
    if dist.is_initialized():
        dist.broadcast(value, 0)
    local(own).copy_(value[block_of(own)])


def save_shards(
    directory: Path,
    state: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup,
    scattered: bool,
    finish: Callable[[], None],
) -> TrainFuture[None]:
    """Copy the shards now, write them behind. All ranks call it together; rank 0 calls `finish` when all is written.

    `scattered`: rank 0 alone has the directory. The future raises what went wrong, on any rank.
    """
    copied = {
        name: Shard(
            local(value).to("cpu", copy=True).contiguous(),
            tuple(side.start for side in block_of(value)),
            tuple(value.shape),
        )
        for name, value in state.items()
    }
    if not scattered:
        work = partial(_write_own, directory, copied, group, finish)
    elif dist.get_rank() == 0:
        work = partial(_write_all, directory, copied, group, finish)
    else:
        work = partial(_send, copied, group)
    thread = ThreadPoolExecutor(1)
    saving = thread.submit(work)
    thread.shutdown(wait=False)
    return saving


def stored_state(directory: Path) -> dict[str, tuple[tuple[int, ...], StoredWeight]]:
    """The whole shape and the blocks of every tensor in a directory's files.

    Raises `BadInput` where a file is damaged, or one with a part of a tensor is missing.
    """
    pieces: dict[str, list[tuple[Piece, object]]] = defaultdict(list)
    for path in sorted(directory.glob("*.safetensors")):
        file = opened(path)
        blocks = json.loads((file.metadata() or {}).get(BLOCKS, "{}"))
        for name in file.keys():  # noqa: SIM118
            shape = shape_in(file, name)
            starts = blocks[name]["saved_offsets"] if name in blocks else [0] * len(shape)
            block = tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))
            pieces[name].append((Piece(name, shape, block, tuple(range(len(shape)))), file))
    found = {}
    for name, of in pieces.items():
        blocks_there = {tuple((side.start, side.stop) for side in piece.block) for piece, _ in of}
        shape = tuple(max(ends) for ends in zip(*([stop for _, stop in block] for block in blocks_there), strict=True))
        if sum(prod(stop - start for start, stop in block) for block in blocks_there) < prod(shape):
            raise BadInput(f"{directory}: a file with a part of {name} is missing; {MEND}")
        found[name] = shape, StoredWeight(of)
    return found


def _write_own(
    directory: Path, shards: Mapping[str, Shard], group: dist.ProcessGroup, finish: Callable[[], None]
) -> None:
    rank, problem = dist.get_rank(), None
    try:
        directory.mkdir(exist_ok=True)
        real = {name: shard for name, shard in shards.items() if shard.own.numel()}
        about = {name: {"saved_offsets": list(shard.starts)} for name, shard in real.items()}
        file = directory / f"shard-{rank + 1:05d}.safetensors"
        tensors = ((name, shard.own) for name, shard in real.items())
        for _ in write_tensors(file, real, tensors, {BLOCKS: json.dumps(about, separators=(",", ":"))}):
            """Each is written as it is asked for."""
    except OSError as error:
        problem = error
    told = [torch.empty(1, dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(told, torch.tensor([int(problem is None)]), group)
    if problem is not None:
        raise problem
    if failed := [str(number) for number, whole in enumerate(told) if not whole]:
        raise OSError(f"{directory}: rank {', '.join(failed)} could not write its part of the checkpoint")
    if rank == 0:
        finish()


def _send(shards: Mapping[str, Shard], group: dist.ProcessGroup) -> None:
    for own, starts, _ in shards.values():
        dist.send(torch.tensor([*starts, *own.shape]), 0, group)
        if own.numel():
            dist.send(own, 0, group)


def _write_all(
    directory: Path, shards: Mapping[str, Shard], group: dist.ProcessGroup, finish: Callable[[], None]
) -> None:
    directory.mkdir()
    for _ in write_tensors(directory / "whole.safetensors", shards, _gathered(shards, group)):
        """Each is gathered and written as it is asked for."""
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


def _place(whole: torch.Tensor, part: torch.Tensor, starts: "tuple[int, ...] | list[int]") -> None:
    whole[tuple(slice(start, start + size) for start, size in zip(starts, part.shape, strict=True))] = part
