"""SGLang beside the trainer on one device: how fast it generates, how fast new weights reach it by each way, and how
far its log-probabilities are from the trainer's.

It needs an interpreter with SGLang: $SGLANG_PYTHON, this one, or what `make engines` has built here. Further arguments
of the server stand in $SGLANG_ARGUMENTS.
"""

import importlib.util
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import torch

from infra.servers.model import ServedModel
from rollouts_core.config import EngineConfig
from rollouts_core.inference.engine import GenerationRequest, ModelLimits
from rollouts_core.inference.replicas import SupervisedServers
from rollouts_core.inference.sglang import SGLangEngine
from rollouts_core.inference.transports import BroadcastTransport, DiskTransport, TensorTransport, WeightTransport
from rollouts_core.inference.weights import shapes_of
from tests.gpu.engine import apart_from_trainer
from tests.gpu.rows import tell
from tests.gpu.speed import SHAPES, SMALL, random_model
from tests.rollouts_core.inference.test_engines import all_of
from tests.rollouts_core.models import character_tokenizer
from tests.servers import running_servers

CONTEXT, PROMPT = 512, 32
DEADLINE = 120.0


def main(device: str) -> None:
    python = interpreter()
    if python is None:
        tell("SGLang", "is not on this machine: nothing was run")
        return
    shape, answer, count = (SMALL[0], 16, 8) if device == "cpu" else (SHAPES[0], 256, 64)
    model = random_model(shape, device)
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        place = Path(directory)
        model.save_pretrained(place / "model")
        character_tokenizer().save_pretrained(place / "model")
        config = EngineConfig(kind="sglang", python=python, arguments=arguments(device))
        served = ServedModel(str(place / "model"), "bfloat16", CONTEXT)
        began = time.perf_counter()
        with running_servers(place, config, served, gpus=int(device == "cuda")) as servers:
            tell("SGLang's start", f"{time.perf_counter() - began:.0f} s")
            ways: dict[str, Callable[[], WeightTransport]] = {
                "disk": lambda: DiskTransport(Path(memory)), "tensor": TensorTransport,
                "broadcast": lambda: BroadcastTransport(SupervisedServers(servers.directory)),
            }  # fmt: skip
            for version, (way, make) in enumerate(ways.items(), 1):
                anyio.run(_measure, servers.directory, model, way, make(), version, answer, count)


def interpreter() -> str | None:
    if given := os.environ.get("SGLANG_PYTHON"):
        return given
    if importlib.util.find_spec("sglang"):
        return sys.executable
    built = Path(__file__).parents[2] / ".engines" / "sglang" / "bin" / "python"
    return str(built) if built.exists() else None


def arguments(device: str) -> tuple[str, ...]:
    """The trainer has most of the GPU."""
    fraction = ("--mem-fraction-static", "0.3") if device == "cuda" else ()
    return (*fraction, *shlex.split(os.environ.get("SGLANG_ARGUMENTS", "")))


async def _measure(
    servers: Path, model: Any, way: str, transport: WeightTransport, version: int, answer: int, count: int
) -> None:
    weights = {name: value.detach() for name, value in model.named_parameters()}
    limits = ModelLimits(CONTEXT, model.config.vocab_size, shapes_of(weights))
    engine = SGLangEngine(SupervisedServers(servers), limits, transport)
    try:
        with anyio.fail_after(DEADLINE):
            began = time.perf_counter()
            await engine.update_weights(weights, version)
            tell(f"weights by {way}", f"{time.perf_counter() - began:.2f} s")
            if version > 1:
                return
            requests = _requests(model.config.vocab_size, answer, count)
            began = time.perf_counter()
            made = await all_of(engine, requests)
            tell(f"{count} requests", f"{count * answer / (time.perf_counter() - began):,.0f} tokens/s")
            apart = apart_from_trainer(model, requests, made)
            told = f"mean {apart.mean():.2e}, largest {apart.max():.2e} from the trainer's"
            tell("log-probabilities in bfloat16", told, bool(apart.mean() < 0.05))
    finally:
        await engine.aclose()


def _requests(vocabulary: int, answer: int, count: int) -> list[GenerationRequest]:
    prompts = np.random.default_rng(0).integers(1, vocabulary, (count, PROMPT)).tolist()
    return [GenerationRequest(str(n), tuple(prompt), answer, (), 1.0, n) for n, prompt in enumerate(prompts)]


if __name__ == "__main__":
    torch.manual_seed(0)
    main(sys.argv[1])
