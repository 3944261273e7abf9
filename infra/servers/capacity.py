"""How many servers a machine has room for."""

from rollouts_core.config import EngineConfig
from rollouts_core.config.placement import gpus_of_server


def replicas_on(config: EngineConfig, gpus: int, there: int, machines: int) -> int:
    """Servers that a machine with so many leased GPUs is to have, where `there` are on others already.

    Machines without GPUs share them evenly: each of `machines` has as many as the other, rounded up.
    """
    wanted = max(0, config.replicas - there)
    return min(wanted, gpus // gpus_of_server(config) if gpus else -(-config.replicas // machines))
