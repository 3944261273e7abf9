"""Pages that follow a run, and never end it."""

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.config import PipelineConfig
from rollouts_core.observe.runs import RunLog, open_run
from rollouts_core.store.store import Store, open_store
from tasks import pages as module
from tasks.events import StageChanged, StageProgress, StageRollouts, announce
from tasks.pages import listing, pages
from tests.rollouts_core.observe.viewer_files import index_of, rollout


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "home")


@pytest.fixture
def run(store: Store, pipeline_config: PipelineConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunLog]:
    monkeypatch.setattr(module, "WRITE_SECONDS", 0.0)
    monkeypatch.setattr(module, "SHARE", math.inf)
    run = open_run(store, pipeline_config, [("sft", "ab" * 32)], None)
    yield run
    run.end("Completed")


def rows(outputs: Path) -> list[dict[str, Any]]:
    found = re.search(r"const ROWS = (.*);", (outputs / "index.html").read_text())
    assert found is not None
    told: list[dict[str, Any]] = json.loads(found[1])
    return told


def test_they_are_there_from_the_first_minute_and_follow(
    run: RunLog, store: Store, pipeline_config: PipelineConfig, tmp_path: Path
) -> None:
    outputs = tmp_path / "outputs"
    page = outputs / run.run_id / "report.html"
    with listing(store, outputs):
        with pages(pipeline_config, run, store, outputs):
            assert "location.reload" in page.read_text()
            assert [(row["state"], row["values"]) for row in rows(outputs)] == [("Running", [])]
            run.stage("sft", "ab" * 32, "Running")
            for step in (1, 2):
                announce(StageProgress("sft", step, 9, {"loss": 3.0 - step}, step))
            announce(StageRollouts("rl-1", 1, [rollout(1), rollout(2)]))
            announce(StageRollouts("rl-1", 1, [rollout(1)]))  # told again, after a kill
            assert "SFT: loss per token" in page.read_text()
            assert "viewer/index.html" in page.read_text()
            assert len(index_of(page.parent / "viewer")["step"]) == 2
            (row,) = rows(outputs)
            assert (row["stage"], row["curve"], row["values"]) == ("sft", "sft loss", [2.0, 1.0])
        assert "location.reload" not in page.read_text()
        run.end("Failed", "out of luck")
    assert rows(outputs)[0]["state"] == "Failed"


def test_the_runs_own_report_is_not_written_over(
    run: RunLog, store: Store, pipeline_config: PipelineConfig, tmp_path: Path
) -> None:
    outputs = tmp_path / "outputs"
    with pages(pipeline_config, run, store, outputs):
        run.result([], outputs / run.run_id / "report.html")
        (outputs / run.run_id / "report.html").write_text("its own")
        announce(StageChanged("report", "Completed"))
    assert (outputs / run.run_id / "report.html").read_text() == "its own"


def test_pages_that_cannot_be_written_are_told_of_once_and_the_run_goes_on(
    run: RunLog, store: Store, pipeline_config: PipelineConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither at the beginning nor later."""
    outputs = tmp_path / "outputs"
    with pages(pipeline_config, run, store, outputs):
        shutil.rmtree(outputs)
        outputs.write_text("a file where a directory should be")
        for step in range(3):
            announce(StageProgress("sft", step, 9, {"loss": 1.0}, step))
        assert sum("the run's pages can't be written" in record.message for record in caplog.records) == 1
    with listing(store, outputs), pages(pipeline_config, run, store, outputs):
        announce(StageProgress("sft", 1, 9, {"loss": 1.0}, 1))
