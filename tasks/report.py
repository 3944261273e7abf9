"""report: one HTML page of the run, and the accuracy table in Prefect."""

from collections.abc import Sequence
from pathlib import Path

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from infra.jobs import MachineSession
from rollouts_core.config import PipelineConfig
from rollouts_core.config_files import to_data
from rollouts_core.observe.drawn import plots_artifact, plots_of
from rollouts_core.observe.evaluations import compare_in_order, compare_with_run, name_of, read_evaluations
from rollouts_core.observe.report import write_report
from rollouts_core.observe.runs import AccuracyRecord, RunRecord, find_run
from rollouts_core.stages.plan import Plan
from tasks.making import LIGHT_TASK, recorded


@task(name="report", task_run_name="report", cache_policy=NO_CACHE, **LIGHT_TASK)
def report(
    config: PipelineConfig, stages: Plan, machine: MachineSession, results: Path, against: str | None = None
) -> RunRecord:
    """`against`: a run whose evaluations these are compared with."""
    run, store = machine.run, machine.store
    keys = [stage.key for stage in stages.stages]
    with recorded(run, "report", plots_artifact(keys).key):
        accuracies = read_accuracies(stages, machine)
        points = [accuracy.point for accuracy in accuracies]
        compared = compare_in_order(results, points)
        if against is not None:
            other = find_run(store.home, against)
            compared += compare_with_run(results, Path(other.report or "").parent, other.run_id, points)
        run.result(accuracies, results / "report.html")
        create_table_artifact(
            [
                {"policy": name_of(a.point), "accuracy": a.accuracy, "low": a.low, "high": a.high, "prompts": a.total}
                for a in accuracies
            ],
            key="accuracy",
            description=f"Held-out accuracy of {run.run_id}, with its 95 % interval",
        )
        plots = plots_of(keys, accuracies, results, store)
        write_report(run.record, results, to_data(config), plots, read_evaluations(results, points), compared)
    return run.record


def read_accuracies(stages: Plan, machine: MachineSession) -> Sequence[AccuracyRecord]:
    """From the manifests of the evaluation artifacts."""
    records = []
    for stage in stages.evaluate:
        summary = machine.manifest(stage.artifact).provenance.summary
        point = stage.name.removeprefix("evaluate-")
        records.append(
            AccuracyRecord(point, summary["accuracy"], summary["low"], summary["high"], int(summary["total"]))
        )
    return records
