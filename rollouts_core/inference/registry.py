"""The engine that a config names."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from rollouts_core.config import EngineConfig
from rollouts_core.errors import BadInput
from rollouts_core.inference.embedded import EmbeddedEngine
from rollouts_core.inference.engine import InferenceEngine, ModelLimits, shapes_of
from rollouts_core.inference.replicas import SupervisedServers
from rollouts_core.inference.sglang import SGLangEngine
from rollouts_core.inference.torch_engine import TorchEngine, copy_of
from rollouts_core.inference.transports import BroadcastTransport, DiskTransport, TensorTransport, WeightTransport
from rollouts_core.inference.vllm import VLLMEngine

SERVED_NAME = "policy"
"""How vLLM's servers call the model."""


def engine_for(config: EngineConfig, model: Any, max_length: int, servers: Path | None) -> InferenceEngine:
    """Made in the event loop that it is used in. `model` is the trainer's; `servers` the directory of its servers' job.

    Raises `BadInput` where a config asks for servers and there are none.
    """
    if config.kind == "embedded":
        return EmbeddedEngine(TorchEngine(copy_of(model), max_length, config.max_running_requests))
    if servers is None or not servers.is_dir():
        raise BadInput(f"engine.kind is {config.kind}, and nobody has started servers for this job ({servers})")
    limits = ModelLimits(max_length, model.config.vocab_size, shapes_of(dict(model.named_parameters())))
    start_seconds = config.start_minutes * 60
    memory = Path(json.loads((servers / "spec.json").read_text())["memory"])
    fleet = SupervisedServers(servers)
    if config.kind == "vllm":
        return VLLMEngine(fleet, limits, SERVED_NAME, memory, start_seconds)
    make: dict[str, Any] = {
        "disk": partial(DiskTransport, memory),
        "tensor": partial(TensorTransport, config.tensor_parallel),
        "broadcast": partial(BroadcastTransport, config.tensor_parallel),
    }
    transport: WeightTransport = make[config.weight_sync]()
    return SGLangEngine(fleet, limits, transport, start_seconds)


def shares_device(config: EngineConfig, servers: Path | None) -> bool:
    """Whether the servers use the trainer's GPU."""
    if config.kind == "embedded" or servers is None or not (servers / "spec.json").exists():
        return False
    return bool(json.loads((servers / "spec.json").read_text()).get("colocated"))
