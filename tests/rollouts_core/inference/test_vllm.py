"""Which answers of vLLM's servers count when weights come while they are made."""

from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from rollouts_core.inference.engine import Completion, FinishReason, GenerationRequest, ModelLimits
from rollouts_core.inference.replicas import FixedServers, Replica
from rollouts_core.inference.transports import DiskTransport
from rollouts_core.inference.vllm import VLLMEngine

URL = "http://replica"


@pytest.mark.parametrize(
    ("reason", "crossed", "kept"),
    [("length", 0, 4), ("abort", 1, 4 + 4), ("length", 1, 4), ("abort", 2, 4), ("stop", 3, 4)],
)
def test_an_answer_that_an_update_did_not_end_is_asked_for_again(
    reason: FinishReason, crossed: int, kept: int, tmp_path: Path
) -> None:
    """The first answer lives across as many updates; it counts where the first of them has ended it."""
    engine = VLLMEngine(FixedServers([URL]), ModelLimits(64, 24), "policy", DiskTransport(tmp_path))
    engine._members.current = {URL: Replica(URL, URL)}
    asked: list[Sequence[int]] = []

    async def answer(request: GenerationRequest, replica: Replica, rid: str) -> Completion:
        asked.append(request.generated)
        first = len(asked) == 1
        engine._swaps[URL] += crossed if first else 0
        return Completion(request.request_id, (1, 2, 3, 4), (-1.0,) * 4, (1,) * 4, reason if first else "length")

    engine._answer = answer  # type: ignore[method-assign]
    completion = anyio.run(engine.generate, GenerationRequest("r", (1, 2), 8, ()))
    assert len(completion.tokens) == kept and completion.finish_reason == "length"
    assert asked[1:] == ([] if reason == "length" and not crossed else [(1, 2, 3, 4) if kept == 8 else ()])
