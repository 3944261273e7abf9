"""The artifacts of a run in Prefect's UI: the plan, each stage's metrics and curves, rollouts, the pages.

Decision: the task that has the data makes the Prefect artifact, from the stage's artifact or the run's results, and
nothing is stored here. A cached stage is not shown again: the run that made it has shown it.
"""

import base64
import tempfile
from collections.abc import Sequence
from pathlib import Path

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from infra.jobs.session import MachineSession
from infra.results import fetch_file
from rollouts_core.config import MachineConfig
from rollouts_core.metrics.loggers import read_jsonl
from rollouts_core.observe.charts import Records, Training, training_charts
from rollouts_core.observe.evaluations import name_of
from rollouts_core.observe.run_records import RunRecord
from rollouts_core.observe.served import address_of
from rollouts_core.rollout.record_files import LATEST
from rollouts_core.stages.explain import explain
from rollouts_core.stages.plan import Plan
from rollouts_core.stages.stage import Stage
from rollouts_core.store.store import Store

SHOWN_ROLLOUTS = 24
SHOWN_TEXT = 300


def show_plan(stages: Plan, store: Store, machine: MachineConfig) -> None:
    """A table of the stages: what each is keyed by, whether it is cached, and if not, why."""
    rows = [
        {"stage": told.stage, "state": told.state, "why": "\n".join(told.lines()), "key": told.key[:16]}
        for told in explain(stages, store, machine)
    ]
    create_table_artifact(rows, key="plan", description="What is cached, what is to run, and why")


def show_stage(stage: Stage, machine: MachineSession) -> None:
    """Metrics and curves of a stage that this run has made; of RL, some of its rollouts."""
    if stage.kind == "sft" or stage.kind == "dpo" or stage.kind == "rl":
        _show_metrics(stage.name, stage.kind, _records(stage, machine, "metrics.jsonl"))
    if stage.kind == "rl":
        _show_rollouts(stage.name, _records(stage, machine, LATEST))


def show_failure(stage: str, error: Exception) -> None:
    """Show why a stage failed: its last log lines, and what to do."""
    create_markdown_artifact(f"```\n{error}\n```", key="failed", description=f"{stage} failed")


def show_accuracies(record: RunRecord) -> None:
    rows = [
        {
            "policy": name_of(entry.point),
            "accuracy": f"{100 * entry.accuracy:.1f} %",
            "95 % interval": f"{100 * entry.low:.1f} to {100 * entry.high:.1f} %",
            "prompts": entry.total,
        }
        for entry in record.accuracies
    ]
    create_table_artifact(rows, key="accuracy", description=f"Held-out accuracy of {record.run_id}")


def show_pages(record: RunRecord, pages: Sequence[Path]) -> None:
    """Links where the pages are served, paths where they are not: no browser follows a link from a server to a file."""
    lines = [f"**{record.run_id}**", ""]
    for page in pages:
        name = "Rollouts" if page.name == "index.html" else "Report"
        address = address_of(str(page.relative_to(Path(record.report or "").parents[1])))
        lines.append(f"- [{name}]({address})" if address else f"- {name}: `{page}`")
    create_markdown_artifact("\n".join(lines), key="report", description="The run's report and its rollouts")


def _records(stage: Stage, machine: MachineSession, name: str) -> Records:
    with tempfile.TemporaryDirectory(prefix="rollouts-showing-") as scratch:
        return read_jsonl(fetch_file(machine, stage.artifact, name, Path(scratch) / "file"))


def _show_metrics(stage: str, training: Training, records: Records) -> None:
    if not records:
        return
    from rollouts_core.observe.plots import picture_of  # a second of imports, for a stage that took longer

    picture = base64.b64encode(picture_of(training_charts(training, records))).decode()
    rows = [
        f"| `{name}` | {_shown(records[0].get(name))} | {_shown(value)} |"
        for name, value in sorted(records[-1].items())
    ]
    table = "\n".join(["| metric | first | last |", "|---|---|---|", *rows])
    text = f"![curves](data:image/png;base64,{picture})\n\n{table}"
    create_markdown_artifact(text, key=f"{stage}-metrics", description=f"{stage}: its curves and metrics")


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else ""


def _show_rollouts(stage: str, records: Records) -> None:
    chosen = records[-SHOWN_ROLLOUTS:]
    rows = [
        {
            "step": record["step"],
            "group": record["group"],
            "prompt": str(record["prompt"])[-SHOWN_TEXT:],
            "answer": str(record["response"])[:SHOWN_TEXT],
            "reward": record["reward"],
            "stop": record["stop"] or record["status"],
        }
        for record in chosen
    ]
    create_table_artifact(rows, key=f"{stage}-rollouts", description=f"{stage}: rollouts of its last steps")
