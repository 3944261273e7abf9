"""Which of a machine's leased GPUs the ranks and the servers have.

Decision: one pure function says it, for the config's checks and for the job of the servers. With as many GPUs as both
need, ranks have the first and servers the next. With fewer, servers begin at the first as well, and give their memory
away while the trainer works. Nothing else is ever shared.

Servers are on the machine of rank 0, each with GPUs that lie side by side.
"""

from dataclasses import dataclass

from rollouts_core.config.engine import EngineConfig


@dataclass(frozen=True)
class Placement:
    """Places among the leased GPUs, from 0; all empty on a machine without."""

    ranks: tuple[int, ...]
    servers: tuple[tuple[int, ...], ...]
    """Of each server."""

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


def gpus_of_server(engine: EngineConfig) -> int:
    return engine.tensor_parallel * engine.data_parallel
