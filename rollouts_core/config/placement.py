"""The GPUs of ranks and of servers, among those that are leased on a machine.

Decision: one pure function decides, for the checks of the config and for the job of the servers. If there are enough
GPUs for both, ranks have the first and servers the next. If there are fewer, servers begin at the first as well, and
release their memory while the trainer works. Nothing else is shared.

Servers are on the machine of rank 0, each with adjacent GPUs. Servers of models beside the policy have the last GPUs,
and share them with nobody.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rollouts_core.config.engine import EngineConfig
from rollouts_core.config.served import Served


@dataclass(frozen=True)
class Placement:
    """Places among the leased GPUs, from 0; all empty on a machine without."""

    ranks: tuple[int, ...]
    servers: tuple[tuple[int, ...], ...]
    """The GPUs of each server."""

    @property
    def colocated(self) -> bool:
        """Whether ranks and servers share GPUs."""
        return any(gpu in self.ranks for server in self.servers for gpu in server)


def placement_of(gpus: int, ranks: int, engine: EngineConfig | None) -> Placement:
    """`gpus`: leased on this machine; `ranks`: on this machine. `engine`: None where no servers are on it.

    Raises ValueError when there are too few GPUs.
    """
    servers, each = (engine.replicas, gpus_of_server(engine)) if engine is not None and engine.has_servers else (0, 0)
    if not gpus:
        return Placement((), ((),) * servers)
    needed = max(ranks, servers * each)
    if gpus < needed:
        needs = [f"backend.processes makes {ranks} ranks with a GPU each"] if gpus < ranks else []
        if gpus < servers * each:
            needs.append(f"engine.replicas makes {servers} servers of {each} GPUs (tensor_parallel x data_parallel)")
        raise ValueError(f"{needed} are needed and {gpus} leased: {'; '.join(needs)}")
    first = ranks if gpus >= ranks + servers * each else 0
    starts = range(first, first + servers * each, each or 1)
    return Placement(tuple(range(ranks)), tuple(tuple(range(start, start + each)) for start in starts))


def left_by_served(gpus: int, served: Sequence[Served]) -> int:
    """The number of leased GPUs that are left for the ranks and the policy's servers. Raises ValueError where none are
    left."""
    taken = sum(_gpus_of(one.engine) for one in served if one.engine.machines is None)
    if gpus and taken >= gpus:
        names = ", ".join(one.name for one in served if one.engine.machines is None)
        raise ValueError(f"{names} (served) need {taken} GPUs for themselves and {gpus} are leased")
    return gpus - taken if gpus else 0


def placement_of_served(gpus: int, served: Sequence[Served], name: str) -> Placement:
    """The GPUs of the servers of the model `name`, which is served on this machine."""
    (one,) = (one for one in served if one.name == name)
    each = gpus_of_server(one.engine)
    if not gpus:
        return Placement((), ((),) * one.engine.replicas)
    here = [other for other in served if other.engine.machines is None]
    end = gpus - sum(_gpus_of(other.engine) for other in here[: here.index(one)])
    starts = range(end - _gpus_of(one.engine), end, each)
    return Placement((), tuple(tuple(range(start, start + each)) for start in starts))


def _gpus_of(engine: EngineConfig) -> int:
    return engine.replicas * gpus_of_server(engine)


def gpus_of_server(engine: EngineConfig) -> int:
    return engine.tensor_parallel * engine.data_parallel
