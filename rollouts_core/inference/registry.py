"""The engine that a config names.

Each kind of server has a file of its name here, whose `create` makes the engine, and one in `infra.servers`, which says
how servers are installed and started.
"""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from rollouts_core.config import EngineConfig
from rollouts_core.errors import BadInput
from rollouts_core.inference.embedded import EmbeddedEngine
from rollouts_core.inference.engine import InferenceEngine, ModelLimits, shapes_of
from rollouts_core.inference.replicas import SupervisedServers
from rollouts_core.inference.torch_engine import TorchEngine, copy_of


def engine_for(config: EngineConfig, model: Any, max_length: int, servers: Path | None) -> InferenceEngine:
    """Made in the event loop that it is used in. `model` is the trainer's; `servers` the directory of its servers' job.

    Raises `BadInput` where a config asks for servers and there are none.
    """
    if config.kind == "embedded":
        return EmbeddedEngine(TorchEngine(copy_of(model), max_length, config.max_running_requests))
    if servers is None or not servers.is_dir():
        raise BadInput(f"engine.kind is {config.kind}, and nobody has started servers for this job ({servers})")
    limits = ModelLimits(max_length, model.config.vocab_size, shapes_of(dict(model.named_parameters())))
    memory = Path(json.loads((servers / "spec.json").read_text())["memory"])
    engine: InferenceEngine = import_module(f"rollouts_core.inference.{config.kind}").create(
        config, SupervisedServers(servers), limits, memory
    )
    return engine


def shares_device(config: EngineConfig, servers: Path | None) -> bool:
    """Whether the servers use the trainer's GPU."""
    if config.kind == "embedded" or servers is None or not (servers / "spec.json").exists():
        return False
    return bool(json.loads((servers / "spec.json").read_text()).get("colocated"))
