"""Metrics, timing, run records and the report page."""

import json
import os
import signal
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.config import PipelineConfig
from rollouts_core.config.loading import load_config, to_data
from rollouts_core.errors import BadInput
from rollouts_core.evaluation.report import report_of
from rollouts_core.evaluation.results import Result
from rollouts_core.evaluation.results import write_results as evaluation_results
from rollouts_core.metrics.loggers import JSONLLogger, keep_steps, read_jsonl
from rollouts_core.metrics.timing import PhaseTimer
from rollouts_core.observe.evaluations import compare_in_order, read_evaluations
from rollouts_core.observe.report import write_report
from rollouts_core.observe.run_list import find_run, list_runs
from rollouts_core.observe.run_records import AccuracyRecord
from rollouts_core.observe.runs import new_run_id, open_run
from rollouts_core.store.local import LocalStore


def test_metrics_lines_and_going_back(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    logger = JSONLLogger(path)
    for step in range(1, 6):
        logger.log({"loss": 1 / step}, step)
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    keep_steps(path, 3)
    assert [record["step"] for record in read_jsonl(path)] == [1, 2, 3]
    keep_steps(tmp_path / "absent.jsonl", 3)
    assert read_jsonl(tmp_path / "absent.jsonl") == []


def test_phases_and_the_rest_add_up_to_the_step() -> None:
    timer = PhaseTimer()
    with timer.phase("gen"):
        sum(range(10_000))
    with timer.phase("gen"):
        sum(range(10_000))
    metrics = timer.metrics()
    assert set(metrics) == {"timing_s/gen", "timing_s/step", "timing_s/unaccounted"}
    assert metrics["timing_s/gen"] + metrics["timing_s/unaccounted"] == pytest.approx(metrics["timing_s/step"])
    assert metrics["timing_s/unaccounted"] > 0


def test_a_run_record_follows_its_run(pipeline_config: PipelineConfig, tmp_path: Path) -> None:
    run = open_run(LocalStore(tmp_path), pipeline_config, [("sft", "k"), ("report", None)], "flow-1")
    run.stage("sft", "k", "Running")
    run.stage("sft", "k", "Completed", 1.5)
    run.stage("extra", None, "Completed")
    (record,) = list_runs(tmp_path)
    assert record.state == "Running"
    assert [(stage.name, stage.state) for stage in record.stages] == [
        ("sft", "Completed"),
        ("report", "Pending"),
        ("extra", "Completed"),
    ]
    run.end("Failed", "why")
    assert find_run(tmp_path, run.run_id[:8]).error == "why"
    assert load_config(run.directory / "config.json") == pipeline_config
    events = [json.loads(line) for line in (run.directory / "events.jsonl").read_text().splitlines()]
    assert [event.get("state") or event.get("run") for event in events] == [
        "Running",
        "Completed",
        "Completed",
        "Failed",
    ]


def test_runs_that_begin_in_the_same_second_have_different_ids() -> None:
    assert len({new_run_id("small") for _ in range(1000)}) == 1000


def test_a_run_whose_orchestrator_was_killed_is_lost(pipeline_config: PipelineConfig, tmp_path: Path) -> None:
    orchestrator = os.fork()
    if orchestrator == 0:
        run = open_run(LocalStore(tmp_path), pipeline_config, [("sft", "k")], None)
        run.stage("sft", "k", "Running")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(orchestrator, 0)
    assert [record.state for record in list_runs(tmp_path)] == ["Lost"]


def test_a_retried_flow_run_goes_on_in_its_record(pipeline_config: PipelineConfig, tmp_path: Path) -> None:
    first = open_run(LocalStore(tmp_path), pipeline_config, [("sft", "k")], "flow-1")
    first.end("Failed", "why")
    again = open_run(LocalStore(tmp_path), pipeline_config, [("sft", "k")], "flow-1")
    assert (again.run_id, again.record.state, again.record.error) == (first.run_id, "Running", None)
    other = open_run(LocalStore(tmp_path), pipeline_config, [("sft", "k")], "flow-2")
    assert other.run_id != first.run_id
    with pytest.raises(BadInput, match="begins the id of 2 runs"):
        find_run(tmp_path, "small")


class Page(HTMLParser):
    """Collects what a page would load from elsewhere, and checks that its tags are balanced."""

    VOID = ("meta", "br", "link", "img", "path", "use", "rect", "circle")

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.outside += [
            value for name, value in attributes if name in ("src", "href") and value and not value.startswith("#")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_report_is_one_page_that_needs_nothing_else(pipeline_config: PipelineConfig, tmp_path: Path) -> None:
    run = open_run(LocalStore(tmp_path), pipeline_config, [("sft", "k" * 64), ("report", None)], None)
    points = ("base", "sft", "rl")
    accuracies = tuple(AccuracyRecord(point, 0.1 * i, 0.1 * i, 0.1 * i + 0.05, 20) for i, point in enumerate(points))
    write_results(tmp_path, points)
    path = write_report(
        replace(run.record, accuracies=accuracies),
        tmp_path,
        to_data(pipeline_config),
        read_evaluations(tmp_path, points),
        compare_in_order(tmp_path, points),
    )
    page = Page()
    page.feed(path.read_text())
    page.close()
    assert page.outside == []
    assert page.open == []
    text = path.read_text()
    charts = json.loads(text.split('id="charts">')[1].split("</script>")[0])
    assert {"SFT: loss per token", "RL: reward", "RL: entropy"} <= {chart["title"] for chart in charts}
    for words in (
        "after RL",
        "pass@2",
        "+33.3",
        "Accuracy by level",
        "row 9, sample 0: lost",
        "66.7 %",
        "&lt;b&gt;1+1=&lt;/b&gt;",
        "kkkkkkkk",
        "n_samples_per_prompt",
        "unaccounted",
    ):
        assert words in text


def test_policies_that_share_no_scored_prompt_are_reported_without_a_comparison(
    pipeline_config: PipelineConfig, tmp_path: Path
) -> None:
    """As where `evaluation.failures_allowed` is large and each policy failed on other prompts."""
    run = open_run(LocalStore(tmp_path), pipeline_config, [], None)
    points = ("base", "sft")
    write_results(tmp_path, points)
    for point, scored in zip(points, (True, False), strict=True):
        path = tmp_path / "evaluation" / f"{point}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        first = [row | {"reward": None} if (row["source_row"] == 0) == scored else row for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in first))
    compared = compare_in_order(tmp_path, points)
    evaluated = read_evaluations(tmp_path, points)
    page = write_report(run.record, tmp_path, to_data(pipeline_config), evaluated, compared)
    assert "no prompt was scored for both" in page.read_text()


def write_results(directory: Path, points: tuple[str, ...]) -> None:
    sft, rl = JSONLLogger(directory / "sft_metrics.jsonl"), JSONLLogger(directory / "rl_metrics.jsonl")
    for step in range(1, 4):
        sft.log({"loss": 1.0 / step}, step)
        mismatch = {f"sampling/sampling_logp_difference/{name}": 1e-6 for name in ("mean", "max")}
        lengths = {f"completions/{name}_length": 3.0 for name in ("mean", "max")}
        timing: dict[str, Any] = {"timing_s/gen": 1.0, "timing_s/unaccounted": 0.1, "timing_s/step": 1.1}
        rl.log({"reward": 0.5, "reward_std": 0.1, "entropy": 1.0, **mismatch, **lengths, **timing}, step)
    (directory / "evaluation").mkdir()
    for right, point in enumerate(points):
        results = [
            Result(
                row,
                n,
                "<b>1+1=</b>",
                "2",
                "2",
                float(row < right),
                {"form": 0.5},
                "completed",
                2,
                1,
                3,
                {"level": row},
                None,
            )
            for row in range(3)
            for n in range(2)
        ]
        failed = replace(results[0], source_row=9, reward=None, error="lost")
        evaluation_results([*results, failed], directory / "evaluation")
        (directory / "evaluation" / "samples.jsonl").rename(directory / "evaluation" / f"{point}.jsonl")
        report = report_of([*results, failed], (1, 2), ("level",))
        (directory / "evaluation" / f"{point}.json").write_text(json.dumps(asdict(report)))
