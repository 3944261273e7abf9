"""The stage that evaluates: what cannot be scored, what was killed, and that nothing is asked twice."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.config.loading import from_data
from rollouts_core.errors import RolloutsError
from rollouts_core.evaluation.journal import EvaluationJournal
from rollouts_core.evaluation.results import read_results
from rollouts_core.inference.embedded import EmbeddedEngine
from rollouts_core.stages.plan import plan
from rollouts_core.stages.stage import Stage
from rollouts_core.store.local import LocalStore
from tests.rollouts_core.stages.test_resume import Killed, make

Stages = Callable[..., tuple[Stage, LocalStore]]


@pytest.fixture
def stage(small_config: dict[str, Any], addition: Path, tmp_path: Path) -> Stages:
    """Evaluation of the untrained model, on rows of which the second has no answer, with the data tokenized."""

    def of(**evaluation: Any) -> tuple[Stage, LocalStore]:
        rows = [json.loads(line) for line in (addition / "heldout.jsonl").read_text().splitlines()]
        rows[1] = {"messages": rows[1]["messages"]}
        (tmp_path / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        small_config["data"]["heldout"] = {"kind": "jsonl", "path": str(tmp_path / "heldout.jsonl")}
        small_config["evaluation"] |= evaluation
        stages, store = plan(from_data(small_config)), LocalStore(tmp_path / "store")
        make(stages.tokenize, store)
        return stages.evaluate[0], store

    return of


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that reach the engine."""
    found: list[str] = []
    generate = EmbeddedEngine.generate

    async def generating(self: EmbeddedEngine, request: Any) -> Any:
        found.append(request.request_id)
        return await generate(self, request)

    monkeypatch.setattr(EmbeddedEngine, "generate", generating)
    return found


def test_a_row_without_an_answer_is_counted_and_named(stage: Stages, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation, store = stage(failures_allowed=0.1)
    make(evaluation, store)
    report = json.loads((store.open(evaluation.artifact) / "accuracy.json").read_text())
    results = read_results(store.open(evaluation.artifact) / "samples.jsonl")
    assert (report["failed"], report["prompts"]) == (1, len(results) - 1)
    told = "not scored: row 1, sample 0: reward exact_match on source row 1"
    assert told in capsys.readouterr().out
    assert [result.source_row for result in results if result.error] == [1]


def test_more_failures_than_allowed_keep_what_was_answered(stage: Stages, asked: list[str]) -> None:
    evaluation, store = stage(failures_allowed=0.0)
    with pytest.raises(RolloutsError, match=r"1 of 25 samples were not scored, and evaluation\.failures_allowed is 0"):
        make(evaluation, store)
    assert len(asked) == len(set(asked)) == 25
    with pytest.raises(RolloutsError, match="are kept for a retry"):
        make(evaluation, store)
    assert len(asked) == 25


def test_killed_in_the_midst_it_asks_for_the_rest_alone(
    stage: Stages, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation, store = stage(failures_allowed=0.1, samples_per_prompt=2, temperature=1.0)
    answered, kept = EvaluationJournal.answered, []

    def dies(self: EvaluationJournal, *arguments: Any) -> None:
        if len(kept) == 20:
            raise Killed
        answered(self, *arguments)
        kept.append(arguments)

    with monkeypatch.context() as patch:
        patch.setattr(EvaluationJournal, "answered", dies)
        with pytest.raises(Killed):
            make(evaluation, store)
    before = len(asked)
    make(evaluation, store)
    assert len(asked) - before == 50 - 20
    results = read_results(store.open(evaluation.artifact) / "samples.jsonl")
    assert [(result.source_row, result.sample) for result in results] == [
        (row, n) for row in range(25) for n in range(2)
    ]
