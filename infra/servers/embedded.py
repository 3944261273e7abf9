"""Servers of our own, of the embedded engine: they run in the environment that jobs run in."""

from typing import Any

from infra.servers.model import ServedModel
from rollouts_core.config import EngineConfig


def server(config: EngineConfig, model: ServedModel, python: str, on_gpu: bool) -> dict[str, Any]:
    command = [
        python, "-m", "rollouts_core.serving.replica", "--model-path", model.path, "--dtype", model.dtype,
        "--context-length", str(model.max_length), "--max-running-requests", str(config.max_running_requests),
        "--device", "cuda" if on_gpu else "cpu", "--port", "{port}",
    ]  # fmt: skip
    return {
        "command": command,
        "environment": {},
        "ready": "/health_generate",
        "probe": "/server_info",
        "abort": {"path": "/abort_request", "body": {"abort_all": True}},
    }


def router(python: str) -> None:
    """None: the engine shares requests out itself."""
