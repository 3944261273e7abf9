"""The embedded engine on other machines, as servers of our own (`serving.replica`) that speak SGLang's protocol.

A request has the whole seed and says which tokens are the answer's. So an answer has the same bits on every machine,
and the same tokens if it continues elsewhere.
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
