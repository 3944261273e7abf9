"""The engine that generates: a copy of the model in this process, a server by its address, or one's own."""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rollouts_core.config import EngineConfig
from rollouts_core.errors import MISSHAPEN, BadInput
from rollouts_core.inference.engine import InferenceEngine
from rollouts_core.inference.registry import embedded_engine, server_engine
from rollouts_core.inference.replicas import FixedServers
from rollouts_core.inference.torch_engine import TorchEngine, copy_of
from rollouts_core.library.models import LanguageModel
from rollouts_core.loopback import opened

ANSWER_SECONDS = 10.0
EMBEDDED = "embedded"
SHARED_MEMORY = Path("/dev/shm")

MakeEngine = Callable[[], InferenceEngine]


def create_engine(policy: LanguageModel, max_length: int | None = None) -> TorchEngine:
    """An engine in this process, for loops that are written out: `generate` gives completions, `update_weights` takes
    the trained weights. `max_length`: tokens of the longest prompt and answer together; None: all that the model has.

    Examples:
        >>> engine = rc.create_engine(policy, max_length=512)
        >>> samples = rc.generate_samples(engine, policy.tokenizer, prompts, sampling, step=1)
    """
    return TorchEngine(copy_of(policy.model), max_length or policy.longest)


def check_engine(engine: Any) -> None:
    """Raises `BadInput`, naming the argument, if it is not one of what `maker_of` takes."""
    if isinstance(engine, str) and engine != EMBEDDED:
        kind_at(engine)
    elif not isinstance(engine, str) and engine is not None and not callable(engine):
        raise BadInput(f"engine: a {type(engine).__name__} is neither an address nor a function that makes an engine")


@contextmanager
def maker_of(engine: Any, policy: LanguageModel, max_length: int) -> Iterator[tuple[MakeEngine, bool]]:
    """A function that makes the engine in its event loop, and whether the engine works in this process.

    `engine`: None or "embedded", the address of an SGLang or vLLM server, or a function that makes an engine.
    """
    if engine is None or engine == EMBEDDED:
        yield partial(embedded_engine, EngineConfig(), copy_of(policy.model), policy.tokenizer, max_length), True
    elif isinstance(engine, str):
        config = EngineConfig(kind=kind_at(engine))
        parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        with tempfile.TemporaryDirectory(prefix="rollouts-weights-", dir=parent) as memory:
            servers = FixedServers([engine.rstrip("/")], memory=Path(memory))
            yield partial(server_engine, config, servers, policy.model, max_length, Path(memory)), False
    else:
        yield engine, False


def kind_at(address: str) -> Literal["sglang", "vllm"]:
    """The kind of the server at an address. Raises `BadInput` if no server answers, or one of another kind."""
    url = f"{address.rstrip('/')}/v1/models"
    try:
        with opened(url, ANSWER_SECONDS) as answer:
            owner = str(json.load(answer)["data"][0]["owned_by"])
    except (OSError, *MISSHAPEN) as error:
        raise BadInput(
            f"engine: {url} does not answer as a server of models does: {type(error).__name__}: {error}"
        ) from None
    if owner == "sglang" or owner == "vllm":
        return owner  # type: ignore[return-value]
    raise BadInput(f"engine: {address} is served by {owner}; SGLang and vLLM are known")
