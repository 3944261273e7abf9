"""Servers of our own, of the embedded engine: they run in the environment that jobs run in.

Those of the policy get its weights from the trainer (`serving.replica`); a model beside it has its own
(`serving.beside`).

They have no `abort`. If a machine is drained, answers either end or are broken off, and those are made again from their
beginning: an answer that continues with its tokens has the same tokens, but log-probabilities with other last bits.
"""

from typing import Any

from infra.servers.model import ServedModel
from rollouts_core.config import EngineConfig


def server(config: EngineConfig, model: ServedModel, python: str, on_gpu: bool) -> dict[str, Any]:
    module = "beside" if model.name else "replica"
    command = [
        python, "-m", f"rollouts_core.serving.{module}", "--model-path", model.path, "--dtype", model.dtype,
        "--context-length", str(model.max_length), "--max-running-requests", str(config.max_running_requests),
        "--device", "cuda" if on_gpu else "cpu", "--port", "{port}",
    ]  # fmt: skip
    if model.name:
        command += ["--name", model.name, *(["--scores"] if model.scores else [])]
    return {"command": command, "environment": {}, "ready": "/health_generate", "probe": "/server_info"}


def router(python: str) -> None:
    """None: this engine needs no router, since it distributes requests itself."""
