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
from rollouts_core.observe.report import POINTS, write_report
from rollouts_core.observe.runs import AccuracyRecord, RunRecord
from rollouts_core.stages.plan import Plan
from tasks.making import LIGHT_TASK, recorded


@task(name="report", task_run_name="report", cache_policy=NO_CACHE, **LIGHT_TASK)
def report(config: PipelineConfig, stages: Plan, machine: MachineSession, results: Path) -> RunRecord:
    run, store = machine.run, machine.store
    keys = [stage.key for stage in stages.stages]
    with recorded(run, "report", plots_artifact(keys).key):
        accuracies = read_accuracies(stages, machine)
        run.result(accuracies, results / "report.html")
        create_table_artifact(
            [
                {"policy": POINTS[a.point], "accuracy": a.accuracy, "low": a.low, "high": a.high, "prompts": a.total}
                for a in accuracies
            ],
            key="accuracy",
            description=f"Held-out accuracy of {run.run_id}, with its 95 % interval",
        )
        plots = plots_of(keys, accuracies, results, store)
        write_report(run.record, results, to_data(config), plots)
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
