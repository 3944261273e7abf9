"""Inference servers as a service job: how SGLang, its router and vLLM are started, and the job that keeps them.

Decision: servers are a job beside the trainer's, `serve-` and its name, on the same machine: the trainer finds them in
the directory beside its own, and a trainer that is killed and tried again finds them warm. The job is attended by the
trainer and by whoever follows it; when both are gone it ends within `UNATTENDED_SECONDS`.

Decision: with as many GPUs as servers and trainer need, the trainer has the first and the servers the others; with
fewer they share, and the servers give their memory away while the trainer works.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.machines.machine import Job
from rollouts_core.config import Dtype, EngineConfig

UNATTENDED_SECONDS = 120.0
SERVICE_SECONDS = 30 * 24 * 3600.0
RESTARTS = 3
"""Starts in a row that may fail."""
SGLANG_MARGIN = 8
"""Tokens of the context that SGLang keeps to itself; the engine sees to it that no position is beyond the model's."""
CPU_SERVER_TOKENS = 65536
"""Of the key-value cache on a CPU host, where the default would take most of its memory."""


@dataclass(frozen=True)
class ServedModel:
    """What the servers load at their start; the trainer gives them its weights before they are asked anything."""

    path: str
    dtype: Dtype
    max_length: int


def serve_job(
    name: str,
    command: Sequence[str],
    config: EngineConfig,
    model: ServedModel,
    python: str,
    gpus: int,
    memory: str | None,
) -> Job:
    """`command` runs `infra.host.servers` there. `python` has the server's package. `gpus`: how many are leased."""
    entry = sglang_server if config.kind == "sglang" else vllm_server
    spec = {
        "replicas": [
            {
                "name": f"replica-{number}",
                "devices": _devices(config, number, gpus),
                **entry(config, model, python, on_gpu=gpus > 0),
            }
            for number in range(config.replicas)
        ],
        "router": sglang_router(python) if config.kind == "sglang" and config.replicas > 1 else None,
        "start_seconds": config.start_minutes * 60,
        "hang_seconds": config.hang_seconds,
        "restarts": RESTARTS,
        "memory": memory,
        "colocated": is_colocated(config, gpus),
    }
    return Job(service_name(name), tuple(command), spec, SERVICE_SECONDS, UNATTENDED_SECONDS, SERVICE_SECONDS)


def service_name(job: str) -> str:
    """The servers' job that belongs to a trainer's."""
    return f"serve-{job}"


def is_colocated(config: EngineConfig, gpus: int) -> bool:
    """Whether trainer and servers share GPUs."""
    return 0 < gpus <= gpus_needed(config)


def gpus_needed(config: EngineConfig) -> int:
    return config.replicas * config.tensor_parallel * config.data_parallel


def sglang_server(config: EngineConfig, model: ServedModel, python: str, on_gpu: bool) -> dict[str, Any]:
    command = [
        python, "-m", "sglang.launch_server", "--model-path", model.path, "--dtype", model.dtype,
        "--context-length", str(model.max_length + SGLANG_MARGIN),
        "--max-running-requests", str(config.max_running_requests),
        "--tp-size", str(config.tensor_parallel), "--dp-size", str(config.data_parallel),
        "--host", "127.0.0.1", "--port", "{port}", "--skip-server-warmup", "--log-level-http", "warning",
        "--sleep-on-idle",
    ]  # fmt: skip
    environment = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    environment |= {"HF_HUB_OFFLINE": "1"} if Path(model.path).is_absolute() else {}
    if on_gpu:
        command += ["--enable-memory-saver"]
    else:
        command += [
            "--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule",
            "--mem-fraction-static", "0.1", "--max-total-tokens", str(CPU_SERVER_TOKENS),
        ]  # fmt: skip
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    return {
        "command": [*command, *config.arguments],
        "environment": environment,
        "ready": "/health_generate",
        "probe": "/server_info",
    }


def sglang_router(python: str) -> dict[str, Any]:
    """Without workers: a replica joins when it has the current weights. A session stays with its replica."""
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


def vllm_server(config: EngineConfig, model: ServedModel, python: str, on_gpu: bool) -> dict[str, Any]:
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", model.path, "--served-model-name", "policy",
        "--dtype", model.dtype, "--max-model-len", str(model.max_length),
        "--max-num-seqs", str(config.max_running_requests), "--tensor-parallel-size", str(config.tensor_parallel),
        "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--host", "127.0.0.1",
        "--port", "{port}", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    environment |= {"HF_HUB_OFFLINE": "1"} if Path(model.path).is_absolute() else {}
    if on_gpu:
        command += ["--enable-sleep-mode"]
    else:
        command += ["--enforce-eager"]
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    return {
        "command": [*command, *config.arguments],
        "environment": environment,
        "ready": "/health",
        "probe": "/health",
    }


def _devices(config: EngineConfig, number: int, gpus: int) -> list[int]:
    """Places of a replica's GPUs among those leased; none on a host without."""
    if not gpus:
        return []
    each = config.tensor_parallel * config.data_parallel
    first = (0 if is_colocated(config, gpus) else 1) + number * each
    return [(first + offset) % gpus for offset in range(each)]
