"""The way of new weights to replicas that a config asks for."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from rollouts_core.config import EngineConfig
from rollouts_core.inference.machine_transport import MachineTransport
from rollouts_core.inference.replicas import Fleet
from rollouts_core.inference.transports import (
    BroadcastTransport,
    DiskTransport,
    FileTransport,
    TensorTransport,
    WeightTransport,
)


def transport_for(config: EngineConfig, fleet: Fleet, memory: Path) -> WeightTransport:
    """The transport that `engine.weight_sync` names. `memory`: a directory for weights on their way."""
    make: dict[str, Callable[[], WeightTransport]] = {
        "disk": partial(file_transport, config, fleet, memory),
        "tensor": partial(TensorTransport, config.tensor_parallel),
        "broadcast": partial(BroadcastTransport, fleet, config.tensor_parallel),
    }
    return make[config.weight_sync]()


def file_transport(config: EngineConfig, fleet: Fleet, memory: Path) -> FileTransport:
    """A transport by files, to servers of this machine by way of `memory`, or to other machines."""
    return MachineTransport(fleet) if config.machines else DiskTransport(memory)
