"""The engine that a config names.

Each kind of server has a file of its name here, whose `create` makes the engine, and one in `infra.servers`, which
installs and starts the servers.
"""

import json
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rollouts_core.config import EngineConfig
from rollouts_core.errors import BadInput
from rollouts_core.inference.embedded import EmbeddedEngine
from rollouts_core.inference.engine import InferenceEngine, ModelLimits
from rollouts_core.inference.file_names import file_shapes, named_as_in_files
from rollouts_core.inference.published import MIXTURES_ON_VLLM
from rollouts_core.inference.replicas import Fleet, SupervisedServers
from rollouts_core.inference.routing import experts_of, routers_of
from rollouts_core.inference.torch_engine import TorchEngine, copy_of


def engine_for(
    config: EngineConfig, model: Any, tokenizer: Any, max_length: int, servers: Path | None, device: str = "cpu"
) -> InferenceEngine:
    """Made in the event loop that it is used in. `model` is the trainer's; `servers` the directory of its servers' job;
    `device` where the embedded engine's copy of a blank model is.

    Raises `BadInput` where a config asks for servers and there are none.
    """
    if not config.has_servers:
        return embedded_engine(config, copy_of(model, device), tokenizer, max_length)
    if servers is None or not servers.is_dir():
        raise BadInput(f"engine.kind is {config.kind}, and nobody has started servers for this job ({servers})")
    memory = Path(json.loads((servers / "spec.json").read_text())["memory"])
    return server_engine(config, SupervisedServers(servers), model, max_length, memory)


def server_engine(config: EngineConfig, fleet: Fleet, model: Any, max_length: int, memory: Path) -> InferenceEngine:
    """Over servers that are there, which know weights by the names of a model's files. `memory`: a directory for
    weights on their way.

    Raises `BadInput` for a mixture on vLLM, and where the config replays experts and the model's are not known.
    """
    if config.kind == "vllm" and any(experts_of(model)):
        raise BadInput(f"engine.kind: {model.config.model_type} is a mixture of experts, and {MIXTURES_ON_VLLM}")
    shapes = {name: shape for name, (_, shape) in file_shapes(model).items()}
    routers = routers_of(model) if config.replay_experts else None
    if config.replay_experts and routers is None:
        raise BadInput(f"engine.replay_experts: {model.config.model_type} has no experts whose routers are known")
    if config.kind == "embedded" and any(experts_of(model)):
        raise BadInput(
            f"engine.machines: {model.config.model_type} is a mixture of experts, which the embedded engine serves in "
            "the trainer's process alone; use sglang"
        )
    limits = ModelLimits(max_length, model.config.vocab_size, shapes, named_as_in_files(model), routers)
    module = "own_servers" if config.kind == "embedded" else config.kind
    created: InferenceEngine = import_module(f"rollouts_core.inference.{module}").create(config, fleet, limits, memory)
    return created


def embedded_engine(config: EngineConfig, model: Any, tokenizer: Any, max_length: int) -> EmbeddedEngine:
    """Over a model that is the engine's own from here on."""
    decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return EmbeddedEngine(
        TorchEngine(model, max_length, config.max_running_requests, config.cache_gib, decode, config.replay_experts)
    )


def shares_device(config: EngineConfig, servers: Path | None) -> bool:
    """Whether the servers use the trainer's GPU."""
    if not config.has_servers or servers is None or not (servers / "spec.json").exists():
        return False
    return bool(json.loads((servers / "spec.json").read_text()).get("colocated"))
