"""report: the run's page, its rollout viewer, and in Prefect its accuracies and where both pages are."""

from collections.abc import Sequence
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.jobs.session import MachineSession
from rollouts_core.config import PipelineConfig
from rollouts_core.config.loading import to_data
from rollouts_core.observe.evaluations import compare_in_order, compare_with_run, read_evaluations
from rollouts_core.observe.report import write_report
from rollouts_core.observe.run_list import find_run
from rollouts_core.observe.run_records import AccuracyRecord, RunRecord
from rollouts_core.observe.viewer import write_viewer
from rollouts_core.stages.plan import Plan
from tasks.showing import show_accuracies, show_pages
from tasks.stage_task import LIGHT_TASK, recorded, run_name

DEADLINE = 3 * 3600
"""Seconds. A viewer of many long answers takes minutes."""


@task(name="report", task_run_name=run_name, cache_policy=NO_CACHE, **{**LIGHT_TASK, "timeout_seconds": DEADLINE})
def report(
    config: PipelineConfig, stages: Plan, machine: MachineSession, results: Path, against: str | None = None
) -> RunRecord:
    """`against`: a run whose evaluations these are compared with."""
    run, store = machine.run, machine.store
    with recorded(run, "report"):
        accuracies = read_accuracies(stages, machine)
        points = [accuracy.point for accuracy in accuracies]
        compared = compare_in_order(results, points)
        if against is not None:
            other = find_run(store.home, against)
            compared += compare_with_run(results, Path(other.report or "").parent, other.run_id, points)
        run.result(accuracies, results / "report.html")
        viewer = write_viewer(results, run.run_id)
        page = write_report(run.record, results, to_data(config), read_evaluations(results, points), compared)
        show_accuracies(run.record)
        show_pages(run.record, [page, *([viewer] if viewer else [])])
    return run.record


def read_accuracies(stages: Plan, machine: MachineSession) -> Sequence[AccuracyRecord]:
    """The accuracies in the manifests of the evaluation artifacts."""
    records = []
    for stage in stages.evaluate:
        summary = machine.manifest(stage.artifact).provenance.summary
        point = stage.name.removeprefix("evaluate-")
        records.append(
            AccuracyRecord(point, summary["accuracy"], summary["low"], summary["high"], int(summary["total"]))
        )
    return records
