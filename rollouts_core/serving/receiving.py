"""Weights that reach a replica of ours by broadcast, as SGLang's do."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from anyio import to_thread

from rollouts_core.inference.weight_group import join, leave
from rollouts_core.network import use_interface_towards


class Receiver:
    """The groups that this replica belongs to, and what has arrived since an update began."""

    def __init__(self) -> None:
        self._groups: dict[str, Any] = {}
        self._arrived: dict[str, torch.Tensor] = {}

    async def join(self, asked: Mapping[str, Any]) -> None:
        name, address = asked["group_name"], asked["master_address"]
        use_interface_towards(address)
        joining = partial(
            join, name, address, asked["master_port"], asked["rank_offset"], asked["world_size"], asked["backend"]
        )
        self._groups[name] = await to_thread.run_sync(joining, abandon_on_cancel=True)

    def leave(self, asked: Mapping[str, Any]) -> None:
        if (group := self._groups.pop(asked["group_name"], None)) is not None:
            leave(group)

    def begin(self) -> None:
        self._arrived = {}

    async def take_bucket(self, asked: Mapping[str, Any]) -> None:
        """Receive a broadcast: the bytes of all tensors of a bucket, one after the other."""
        dtypes = [getattr(torch, name) for name in asked["dtypes"]]
        shapes = [tuple(shape) for shape in asked["shapes"]]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        group = self._groups[asked["group_name"]]
        await to_thread.run_sync(partial(dist.broadcast, flat, src=0, group=group), abandon_on_cancel=True)
        for name, part, dtype, shape in zip(asked["names"], torch.split(flat, sizes), dtypes, shapes, strict=True):
            self._arrived[name] = part.clone().view(dtype).view(shape)

    def taken(self) -> Mapping[str, torch.Tensor]:
        """All weights that have arrived; they are no longer kept here."""
        arrived, self._arrived = self._arrived, {}
        return arrived
