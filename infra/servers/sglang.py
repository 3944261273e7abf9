"""SGLang's servers and their router: what they are installed from, and how they are started."""

from pathlib import Path
from typing import Any

from infra.servers.model import ServedModel
from rollouts_core.config import EngineConfig

PACKAGES = ("sglang==0.5.23", "sglang-router==0.3.2")
MODULES = ("sitecustomize.py", "sgl_kernel.py")
CHECK = "import sglang, torch, transformers; print('{}')"
MARGIN = 8
"""Tokens of the context that SGLang keeps to itself; the engine sees to it that no position is beyond the model's."""
CPU_TOKENS = 65536
"""Size of the key-value cache on a CPU host, where the default would take most of its memory."""


def server(config: EngineConfig, model: ServedModel, python: str, on_gpu: bool) -> dict[str, Any]:
    command = [
        python, "-m", "sglang.launch_server", "--model-path", model.path, "--dtype", model.dtype,
        "--context-length", str(model.max_length + MARGIN),
        "--max-running-requests", str(config.max_running_requests),
        "--tp-size", str(config.tensor_parallel), "--dp-size", str(config.data_parallel),
        "--host", "127.0.0.1", "--port", "{port}", "--skip-server-warmup", "--log-level-http", "warning",
        "--sleep-on-idle",
    ]  # fmt: skip
    environment = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    environment |= {"HF_HUB_OFFLINE": "1"} if Path(model.path).is_absolute() else {}
    if on_gpu:
        command += [] if model.name else ["--enable-memory-saver"]
    else:
        command += [
            "--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule",
            "--mem-fraction-static", "0.1", "--max-total-tokens", str(CPU_TOKENS),
        ]  # fmt: skip
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    if model.name:
        command += ["--served-model-name", model.name]
    if not model.has_weights:
        command += ["--load-format", "dummy"]
    if config.machines is not None:
        command += ["--incremental-streaming-output"]
    if config.replay_experts:
        command += ["--enable-return-routed-experts"]
    return {
        "command": [*command, *config.arguments],
        "environment": environment,
        "ready": "/health_generate",
        "probe": "/server_info",
        "abort": {"path": "/abort_request", "body": {"rid": "", "abort_all": True}},
    }


def router(python: str) -> dict[str, Any]:
    """The router. It starts without workers: a replica joins when it has the current weights. A session keeps its
    replica."""
    command = [
        python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", "{port}", "--policy", "manual",
        "--assignment-mode", "min_load", "--prometheus-port", "{other_port}", "--disable-retries",
        "--log-level", "warn", "--health-check-interval-secs", "2", "--health-failure-threshold", "1",
        "--health-success-threshold", "1",
        "--cb-failure-threshold", "1", "--cb-timeout-duration-secs", "2", "--request-timeout-secs", "86400",
    ]  # fmt: skip
    return {
        "name": "router", "devices": [], "command": command, "environment": {}, "ready": "/health",
        "probe": "/health",
    }  # fmt: skip
