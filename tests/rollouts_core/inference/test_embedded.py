from collections.abc import Sequence

import anyio
import pytest
import torch

from rollouts_core.inference.embedded import EmbeddedEngine
from rollouts_core.inference.engine import Completion, GenerationRequest
from rollouts_core.inference.torch_engine import TorchEngine
from tests.rollouts_core.models import CONTEXT, tiny_model

LENGTH = 12


def asked(name: str, seed: int = 0) -> GenerationRequest:
    return GenerationRequest(name, (1, 2, 3), LENGTH, (), 1.0, seed)


@pytest.fixture
def inside() -> TorchEngine:
    return TorchEngine(tiny_model(), CONTEXT, 4)


def test_a_followed_answer_grows_token_by_token_to_the_whole(inside: TorchEngine) -> None:
    async def both() -> tuple[list[Completion], Completion]:
        engine = EmbeddedEngine(inside)
        return [part async for part in engine.follow(asked("a"))], await engine.generate(asked("b"))

    parts, whole = anyio.run(both)
    assert [len(part.tokens) for part in parts] == list(range(1, LENGTH + 1))
    assert all(part.tokens == whole.tokens[: len(part.tokens)] for part in parts)
    assert [part.finish_reason for part in parts] == ["abort"] * (LENGTH - 1) + ["length"]


def test_following_reads_the_prompt_once(inside: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    prefill = inside._decoder.prefill

    def counted(sequences: Sequence[Sequence[int]], first_row: int) -> torch.Tensor:
        read.append(len(sequences))
        return prefill(sequences, first_row)

    monkeypatch.setattr(inside._decoder, "prefill", counted)

    async def follow() -> None:
        async for _ in EmbeddedEngine(inside).follow(asked("a")):
            pass

    anyio.run(follow)
    assert read == [1]


def test_others_go_on_while_a_follower_does_something_else(inside: TorchEngine) -> None:
    """It stops behind its first token until the others have ended."""

    async def run() -> tuple[dict[str, Completion], Completion]:
        engine, ended = EmbeddedEngine(inside), dict[str, Completion]()

        async def generate(name: str, seed: int) -> None:
            ended[name] = await engine.generate(asked(name, seed))

        follower = engine.follow(asked("slow"))
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(generate, "before", 1)
                await anext(follower)
                tasks.start_soon(generate, "behind", 2)
            return ended, [part async for part in follower][-1]

    ended, slow = anyio.run(run)
    alone = inside.generate([asked("before", 1), asked("behind", 2), asked("slow")])
    assert [ended["before"].tokens, ended["behind"].tokens, slow.tokens] == [one.tokens for one in alone]


def test_who_stops_following_has_aborted(inside: TorchEngine) -> None:
    async def run() -> Completion:
        engine = EmbeddedEngine(inside)
        follower = engine.follow(asked("left"))
        await anext(follower)
        await follower.aclose()
        assert not inside.busy
        return await engine.generate(asked("next"))

    assert len(anyio.run(run).tokens) == LENGTH
