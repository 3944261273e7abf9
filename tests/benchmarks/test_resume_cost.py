"""What being resumable costs the default experiment: its checkpoints, and the journal of its rollouts."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.arithmetic import config
from rollouts_core.metrics.loggers import JSONLLogger
from rollouts_core.rollout.journal import RolloutJournal
from rollouts_core.stages.plan import plan
from rollouts_core.stages.workspace import make_stage, open_session
from rollouts_core.store.local import LocalStore
from rollouts_core.training.checkpoint import Checkpoints

pytestmark = pytest.mark.benchmark


def test_share_of_training_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints at the default intervals: how long training waits for them."""
    assert config.sft is not None
    assert config.rl is not None
    short = replace(config, sft=replace(config.sft, steps=301), rl=replace(config.rl, steps=51, steps_per_segment=51))
    stages, store = plan(short), LocalStore(tmp_path)
    assert stages.sft is not None
    spent: list[float] = []

    monkeypatch.setattr(Checkpoints, "begin", _timed(Checkpoints.begin, spent))
    monkeypatch.setattr(RolloutJournal, "note", _timed(RolloutJournal.note, spent))
    for stage in (stages.tokenize, stages.sft, *stages.rl):
        spent.clear()
        began = time.perf_counter()
        with open_session() as session:
            make_stage(stage, store, JSONLLogger(tmp_path / "followed.jsonl"), "cpu", session)
        seconds = time.perf_counter() - began
        if stage.kind != "tokenize":
            print(f"\n{stage.name}: {sum(spent):.3f} s of {seconds:.1f} s, {sum(spent) / seconds:.1%}")


def _timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        result = function(*arguments)
        spent.append(time.perf_counter() - began)
        return result

    return timed
