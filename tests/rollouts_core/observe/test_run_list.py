"""Runs as they are, though most of their records are remembered."""

from dataclasses import replace
from pathlib import Path

import pytest

from rollouts_core.config import PipelineConfig
from rollouts_core.errors import BadInput
from rollouts_core.observe.run_list import all_runs, find_run, list_runs, run_of_flow, runs_beginning
from rollouts_core.observe.runs import open_run
from rollouts_core.store.remembered import FILE
from rollouts_core.store.store import open_store


def test_each_question_sees_each_change(pipeline_config: PipelineConfig, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert list_runs(tmp_path) == []
    run = open_run(store, pipeline_config, [("sft", "ab" * 32)], "flow-1")
    assert [record.state for record in list_runs(tmp_path)] == ["Running"]
    run.stage("sft", "ab" * 32, "Completed", 3.0)
    (record,) = list_runs(tmp_path)
    assert record.stages[0].state == "Completed"
    run.end("Failed", "out of luck")
    assert find_run(tmp_path, run.run_id[:6]).error == "out of luck"
    (tmp_path / FILE).unlink()
    assert [record.state for record in list_runs(tmp_path)] == ["Failed"]


def test_a_run_whose_orchestrator_died_is_lost_whatever_is_remembered(
    pipeline_config: PipelineConfig, tmp_path: Path
) -> None:
    run = open_run(open_store(tmp_path), pipeline_config, [], None)
    assert list_runs(tmp_path)[0].state == "Running"
    run._lock.close()  # as the kernel does
    assert list_runs(tmp_path)[0].state == find_run(tmp_path, run.run_id).state == "Lost"


def test_a_flow_run_goes_on_in_its_record(pipeline_config: PipelineConfig, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = open_run(store, pipeline_config, [], "flow-1")
    first.end("Failed")
    assert open_run(store, pipeline_config, [], "flow-1").run_id == first.run_id
    assert open_run(store, pipeline_config, [], "flow-2").run_id != first.run_id
    found = run_of_flow(tmp_path, "flow-1")
    assert found is not None and found.run_id == first.run_id
    assert run_of_flow(tmp_path, "flow-3") is None


def test_a_run_is_found_by_how_its_id_begins(pipeline_config: PipelineConfig, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    one, other = (open_run(store, replace(pipeline_config, name=name), [], None) for name in ("first", "second"))
    assert find_run(tmp_path, "fi").run_id == one.run_id
    assert runs_beginning(store, "s") == [other.run_id]
    with pytest.raises(BadInput, match="begins the id of 2 runs"):
        find_run(tmp_path, "")
    with pytest.raises(BadInput, match="no run third"):
        find_run(tmp_path, "third")


def test_an_unreadable_record_is_passed_over(pipeline_config: PipelineConfig, tmp_path: Path) -> None:
    run = open_run(open_store(tmp_path), pipeline_config, [], None)
    broken = tmp_path / "runs" / "broken"
    broken.mkdir()
    (broken / "run.json").write_text("{")
    assert [record.run_id for record in list_runs(tmp_path)] == [run.run_id]


def test_runs_of_other_homes_are_seen_in_a_shared_store(
    pipeline_config: PipelineConfig, tmp_path: Path, s3_url: str
) -> None:
    here, there = (open_store(tmp_path / name, s3_url) for name in ("here", "there"))
    run = open_run(here, pipeline_config, [], None)
    for state in ("Running", "Completed"):
        assert [(record.run_id, record.state) for record in all_runs(there)] == [(run.run_id, state)]
        assert find_run(there.home, run.run_id[:5], there).run_id == run.run_id
        assert runs_beginning(there, run.run_id[:5]) == [run.run_id]
        with pytest.raises(BadInput, match="no run"):
            find_run(there.home, run.run_id)
        run.end("Completed")
