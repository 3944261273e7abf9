"""Decoding by recorded steps. In a CUDA graph's place stands torch.fx: it records the same operators on the same places
in memory, and plays them without our code."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import LlamaConfig, Qwen3Config

from rollouts_core.inference import fused, recorded
from rollouts_core.inference.engine import Completion
from rollouts_core.inference.recorded import MOST, RecordedSteps, Work, or_plainly, size_of
from rollouts_core.inference.tiles import TILE
from rollouts_core.inference.torch_engine import TorchEngine, copy_of
from tests.rollouts_core.inference.test_torch_engine import requests
from tests.rollouts_core.models import CONTEXT, SHAPE, tiny_model

ARCHITECTURES = {"llama": LlamaConfig(**SHAPE), "qwen3": Qwen3Config(head_dim=8, **SHAPE)}


class Tape:
    """Records the operators of some work. Counts what it records and plays."""

    def __init__(self) -> None:
        self.recorded = self.played = 0

    def __call__(self, work: Work) -> Work:
        def told() -> torch.Tensor:
            work()
            return torch.zeros(())

        self.recorded += 1
        tape: Callable[[], object] = make_fx(told)()

        def play() -> None:
            self.played += 1
            tape()

        return play


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Tape:
    tape = Tape()
    monkeypatch.setattr(fused, "recorder", lambda device: tape)
    return tape


def close(one: Sequence[Completion], other: Sequence[Completion]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert (mine.tokens, mine.weight_versions) == (theirs.tokens, theirs.weight_versions)
        torch.testing.assert_close(torch.tensor(mine.log_probs), torch.tensor(theirs.log_probs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_recorded_steps_give_what_plain_ones_give(
    architecture: str, tape: Tape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While requests come and go, rows move, the cache grows and new weights arrive."""

    def answers() -> list[Completion]:
        engine = TorchEngine(tiny_model(architecture=ARCHITECTURES[architecture]), CONTEXT, 40)
        first, second = requests(30), requests(9, temperature=0.7)
        second = [replace(entry, request_id=f"s{place}") for place, entry in enumerate(second)]
        found = engine.generate(first[:5])
        engine.submit(first[5:])
        for _ in range(4):
            engine.step()
        engine.update_weights(weights(), 1)
        engine.submit(second)
        while engine.busy:
            engine.step()
        rest = [engine.collect(entry.request_id) for entry in (*first[5:], *second)]
        return [*found, *(completion for completion in rest if completion is not None)]

    def weights() -> dict[str, torch.Tensor]:
        other = tiny_model(seed=5, architecture=ARCHITECTURES[architecture])
        return {name: value.detach() for name, value in copy_of(other).named_parameters()}

    played = answers()
    assert tape.recorded and tape.played > 2 * tape.recorded
    monkeypatch.undo()
    close(played, answers())
    assert len(played) == 39


def test_where_it_cannot_be_recorded_it_goes_on_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(work: Work) -> Work:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    careful = or_plainly(refuse)
    monkeypatch.setattr(fused, "recorder", lambda device: careful)
    found = TorchEngine(tiny_model(), CONTEXT, 40).generate(requests(9))
    assert capsys.readouterr().out == (
        "decoding goes on without CUDA graphs: operation not permitted when stream is capturing\n"
    )
    monkeypatch.undo()
    close(found, TorchEngine(tiny_model(), CONTEXT, 40).generate(requests(9)))


def test_no_more_recordings_than_so_many_are_kept() -> None:
    computed: list[tuple[int, int]] = []

    def step(tokens_B: torch.Tensor, positions_B: torch.Tensor, used: int) -> torch.Tensor:
        computed.append((len(tokens_B), used))
        return torch.zeros(len(tokens_B), 3)

    steps = RecordedSteps(step, lambda work: work, 4, 3, torch.zeros(()))
    for used in range(2 * MOST):
        for _ in range(3):
            steps(torch.ones(2, dtype=torch.long), torch.ones(2, dtype=torch.long), used)
    assert len(steps._played) <= MOST + 1
    assert len(computed) == 6 * MOST


@given(st.integers(1, 200_000))
def test_sizes_are_few_and_little_is_padding(count: int) -> None:
    size = size_of(count)
    assert size % TILE == 0
    assert count <= size <= max(1.25 * count, count + TILE)
    assert size_of(size) == size
    assert len({size_of(number) for number in range(1, 4097)}) <= 8 + 4 * 6


def test_a_cpu_records_nothing() -> None:
    assert recorded.recorder(torch.device("cpu")) is None
