"""vLLM's servers: what they are installed from, and how they are started."""

from pathlib import Path
from typing import Any

from infra.servers.model import ServedModel
from rollouts_core.config import EngineConfig

PACKAGES = ("vllm==0.32.0",)
MODULES = ("sitecustomize.py",)
CHECK = "import vllm, torch; print('{}')"


def server(config: EngineConfig, model: ServedModel, python: str, on_gpu: bool) -> dict[str, Any]:
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", model.path,
        "--served-model-name", model.name or "policy",
        "--dtype", model.dtype, "--max-model-len", str(model.max_length),
        "--max-num-seqs", str(config.max_running_requests), "--tensor-parallel-size", str(config.tensor_parallel),
        "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--host", "127.0.0.1",
        "--port", "{port}", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    command += [] if model.has_weights else ["--load-format", "dummy"]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    environment |= {"HF_HUB_OFFLINE": "1"} if Path(model.path).is_absolute() else {}
    if on_gpu:
        command += [] if model.name else ["--enable-sleep-mode"]
    else:
        command += ["--enforce-eager"]
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    return {
        "command": [*command, *config.arguments],
        "environment": environment,
        "ready": "/health",
        "probe": "/health",
    }


def router(python: str) -> None:
    """None: this engine needs no router, since the trainer's side distributes requests."""
