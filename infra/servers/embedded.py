"""Servers of our own, of the embedded engine: they run in the environment that jobs run in.

They have no `abort`, so a machine that is drained lets its answers end or breaks them off. Those are then made again
from their beginning: an answer that goes on with its tokens has the same tokens, but log-probabilities of other last
bits.
"""

from typing import Any

from infra.servers.model import ServedModel
from rollouts_core.config import EngineConfig


def server(config: EngineConfig, model: ServedModel, python: str, on_gpu: bool) -> dict[str, Any]:
    command = [
        python, "-m", "rollouts_core.serving.replica", "--model-path", model.path, "--dtype", model.dtype,
        "--context-length", str(model.max_length), "--max-running-requests", str(config.max_running_requests),
        "--device", "cuda" if on_gpu else "cpu", "--port", "{port}",
    ]  # fmt: skip
    return {"command": command, "environment": {}, "ready": "/health_generate", "probe": "/server_info"}


def router(python: str) -> None:
    """None: the engine shares requests out itself."""
