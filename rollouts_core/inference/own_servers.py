"""The embedded engine on other machines: servers of our own (`serving.replica`), spoken to as SGLang's are.

A request tells them the whole seed and which tokens are the answer's. So an answer has the same bits wherever it is
made, and the same tokens where it goes on elsewhere.
"""

from pathlib import Path

from rollouts_core.config import EngineConfig
from rollouts_core.inference.engine import GenerationRequest, ModelLimits
from rollouts_core.inference.replicas import Fleet
from rollouts_core.inference.sglang import SGLangEngine
from rollouts_core.inference.transport_choice import transport_for


def create(config: EngineConfig, fleet: Fleet, limits: ModelLimits, memory: Path) -> SGLangEngine:
    transport = transport_for(config, fleet, memory)
    return SGLangEngine(fleet, limits, transport, config.start_minutes * 60, config.min_replicas, _exactly)


def _exactly(request: GenerationRequest) -> dict[str, int]:
    return {"seed": request.seed, "answered_tokens": len(request.generated)}
