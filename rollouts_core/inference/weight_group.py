"""A process group for weights: the trainer is rank 0, every rank of every replica has a number behind it.

torch has no public call for a group beside the default one; its own servers' clients and SGLang make it in this way,
and both ends must agree on the store's prefix.
"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

MEET_SECONDS = 60.0
"""The deadline to form the group, and of each collective in it."""


def join(name: str, address: str, port: int, rank: int, size: int, backend: str) -> Any:
    """Blocks until all are there. Rank 0 listens at the address."""
    timeout = timedelta(seconds=MEET_SECONDS)
    store, rank, size = next(rendezvous(f"tcp://{address}:{port}", rank, size, timeout=timeout))
    store.set_timeout(timeout)
    helper: Any = c10d._new_process_group_helper
    group, _ = helper(
        size, rank, [], c10d.Backend(backend), c10d.PrefixStore(name, store), group_name=name, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {member: member for member in range(size)}
    return group


def leave(group: Any) -> None:
    dist.destroy_process_group(group)
