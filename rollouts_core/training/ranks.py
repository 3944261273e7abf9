"""Several processes that train one policy: rank 0 runs the stage, the others follow its messages.

Decision: one process decides. Loops, generation, rewards and the places of checkpoints belong to rank 0 alone, with the
same code as on one device. The others hold shards and compute. So nothing can drift apart but the tensors, which torch
keeps together.

Decision: messages between ranks are JSON and plain tensors over gloo, on loopback or between the hosts of a job; no
pickle.

If a rank dies, torchrun's agent, which started the ranks, ends them all (`stages/ranks.py`).
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rollouts_core.errors import BadInput
from rollouts_core.memory import GIB, machine_bytes
from rollouts_core.training.backend import TrainBatch
from rollouts_core.training.packed import Span

QUIET = timedelta(hours=24)
"""How long the others may wait for rank 0, which may be generating. One that is gone is noticed by the agent."""


ALIKE = 0.8
"""Memories are alike where the least is this share of the most."""
KINDS = {"float": torch.float32, "integer": torch.int64, "byte": torch.uint8}
"""How tensors are sent."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among them."""

    rank: int
    size: int
    device: torch.device
    context: int = 1
    """Ranks that share a row of tokens."""
    tensor: int = 1
    """Ranks that share each layer's weights; they are neighbours."""
    expert: int = 1
    """Ranks, of those with other tokens, that share a mixture's experts."""

    @property
    def together(self) -> int:
        """Ranks that compute each pass together."""
        return self.context * self.tensor

    @property
    def groups(self) -> int:
        """How many passes are computed at once."""
        return self.size // self.together

    @property
    def group(self) -> int:
        """The group that this rank is in."""
        return self.rank // self.together

    @property
    def answers(self) -> bool:
        """Whether this rank tells rank 0 what its group, not rank 0's own, has computed."""
        return self.group > 0 and self.rank % self.together == 0

    def tell(self, message: Mapping[str, Any]) -> None:
        """Rank 0 to all others, as JSON."""
        data = _as_bytes(message)
        dist.broadcast(torch.tensor([len(data)]), 0)
        dist.broadcast(data, 0)

    def hear(self) -> dict[str, Any]:
        """Wait for the next message of rank 0."""
        found: dict[str, Any] = _from_bytes(partial(dist.broadcast, src=0))
        return found

    def send(self, to: int, about: Mapping[str, Any], numbers: Mapping[str, torch.Tensor]) -> None:
        """JSON, and tensors by name: bytes as they are, other integers as int64, the rest as float32."""
        kinds = {name: _kind(value) for name, value in numbers.items()}
        data = _as_bytes([about, {name: [list(value.shape), kinds[name]] for name, value in numbers.items()}])
        dist.send(torch.tensor([len(data)]), to)
        dist.send(data, to)
        for name, value in numbers.items():
            dist.send(value.to("cpu", KINDS[kinds[name]]).contiguous(), to)

    def memories(self) -> list[int]:
        """Bytes of memory of each rank's device, or its share of its host's; every rank asks for them."""
        if self.device.type == "cuda":
            own = torch.cuda.get_device_properties(self.device).total_memory
        else:
            own = machine_bytes() // int(os.environ["LOCAL_WORLD_SIZE"])
        told = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
        dist.all_gather(told, torch.tensor([own]))
        return [int(value) for value in told]

    def receive(self, sender: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Receive the message of another rank's `send`."""
        about, kinds = _from_bytes(partial(dist.recv, src=sender))
        numbers = {}
        for name, (shape, kind) in kinds.items():
            numbers[name] = torch.empty(shape, dtype=KINDS[kind])
            dist.recv(numbers[name], sender)
        return about, numbers


def join_ranks(device: str) -> Ranks:
    """Enter the group that torchrun's environment describes; `device` is 'cuda' or 'cpu'."""
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if device == "cpu":
        dist.init_process_group("gloo", timeout=QUIET)
        return Ranks(rank, size, torch.device("cpu"))
    there = torch.cuda.device_count()
    own = torch.device("cuda", local % there)
    torch.cuda.set_device(own)
    shared = int(os.environ["LOCAL_WORLD_SIZE"]) > there  # NCCL wants a GPU for each rank
    dist.init_process_group("gloo" if shared else "cpu:gloo,cuda:nccl", timeout=QUIET)
    return Ranks(rank, size, own)


def check_alike(memories: Sequence[int]) -> None:
    """Raises `BadInput` where ranks, which hold alike parts, have memory of unlike size."""
    least, most = (memories.index(wanted) for wanted in (min(memories), max(memories)))
    if memories[least] < ALIKE * memories[most]:
        raise BadInput(
            f"backend.processes: ranks hold parts of one size, and rank {least} has {memories[least] / GIB:.1f} GiB of "
            f"memory, rank {most} has {memories[most] / GIB:.1f} GiB: take machines of one kind (machine.accelerator, "
            "machine.gpu_memory_gb)"
        )


def share_disk() -> bool:
    """Whether there are ranks, and all are on one host."""
    return dist.is_initialized() and int(os.environ["LOCAL_WORLD_SIZE"]) == dist.get_world_size()


def leave_ranks() -> None:
    """Close the process group after a barrier, since ranks still need one that closes early."""
    dist.barrier()
    dist.destroy_process_group()


def send_batch(ranks: Ranks, to: int, batch: TrainBatch) -> None:
    numbers = {
        entry.name: value for entry in fields(batch) if isinstance(value := getattr(batch, entry.name), torch.Tensor)
    }
    about = {name: getattr(batch, name) for name in ("spans", "sequences", "normalizer", "share")}
    ranks.send(to, about, numbers)


def receive_batch(ranks: Ranks) -> TrainBatch:
    """Receive a batch from rank 0."""
    about, numbers = ranks.receive(0)
    about["spans"] = tuple(Span(*span) for span in about["spans"])
    return TrainBatch(**about, **numbers)  # type: ignore[arg-type]


def empty_batch() -> TrainBatch:
    """The batch of a rank without work, so that it takes part in the collectives."""
    one = torch.zeros(1, dtype=torch.long)
    return TrainBatch(torch.zeros(2, dtype=torch.long), torch.arange(2), (Span(0, 2),), one, one, one, 1, 1.0)


def _kind(value: torch.Tensor) -> str:
    if value.is_floating_point():
        return "float"
    return "byte" if value.dtype == torch.uint8 else "integer"


def _as_bytes(message: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)


def _from_bytes(take: Callable[[torch.Tensor], object]) -> Any:
    """JSON that comes as its length and its bytes."""
    length = torch.zeros(1, dtype=torch.long)
    take(length)
    data = torch.empty(int(length), dtype=torch.uint8)
    take(data)
    return json.loads(data.numpy().tobytes())
