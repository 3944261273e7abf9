"""The run report: one self-contained HTML file, made only from the files of a run's results.

Decision: the page contains its data and the library of its charts (uPlot, shipped with us under its licence) and loads
nothing. It is made from files, so `rollouts report` can write it again, beside another run, long after.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from rollouts_core.metrics.loggers import read_jsonl
from rollouts_core.observe.assets import asset
from rollouts_core.observe.charts import charts_of, mean_phases
from rollouts_core.observe.evaluations import Compared, Evaluated, name_of
from rollouts_core.observe.provenance import read_made
from rollouts_core.observe.replica_bands import bands
from rollouts_core.observe.run_records import RunRecord
from rollouts_core.observe.viewer import VIEWER

SAMPLES = 16
MOST_SLICES = 40
TRAININGS = {"sft": "SFT", "dpo": "DPO", "rl": "RL"}

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Against:
    """The run that this one is laid beside."""

    run_id: str
    results: Path
    config_changes: Sequence[tuple[str, str, str]]
    """Field, value here, value there."""


@dataclass(frozen=True)
class Share:
    """A part of a bar."""

    name: str
    seconds: float
    percent: float
    state: str = ""


@dataclass(frozen=True)
class SampleRow:
    """A held-out prompt with the answer at each point, and whether that was right."""

    prompt: str
    answer: str
    responses: Sequence[tuple[str, bool]]


def write_report(
    record: RunRecord,
    results: Path,
    config: Mapping[str, Any],
    evaluated: Sequence[Evaluated],
    compared: Sequence[Compared],
    against: Against | None = None,
    live: bool = False,
) -> Path:
    """Write `report.html` into a run's results; beside another run, `report-against-<its id>.html`.

    A `live` one is loaded again by itself where a server serves it.
    """
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    charts = charts_of(results, against.results if against else None)
    points = [accuracy.point for accuracy in record.accuracies]
    page = environment.get_template("report.html.j2").render(
        record=record,
        live=live,
        against=against,
        points=[name_of(point) for point in points],
        charts=_embedded([asdict(chart) for chart in charts]),
        evaluated=evaluated,
        compared=compared,
        most_slices=MOST_SLICES,
        samples=_samples([read_jsonl(results / "evaluation" / f"{point}.jsonl") for point in points]),
        stage_times=_shares({stage.name: stage.seconds for stage in record.stages}, record),
        phase_times=_phases(results),
        replicas=bands(read_jsonl(results / "rl_metrics.jsonl")),
        made=read_made(results),
        viewer=f"{VIEWER}/index.html" if (results / VIEWER).is_dir() else None,
        config=json.dumps(config, indent=2),
        **{name: Markup(asset(file)) for name, file in PARTS.items()},
    )
    path = results / (f"report-against-{against.run_id}.html" if against else "report.html")
    path.write_text(page)
    return path


PARTS = {
    "style": "report.css", "script": "report.js", "theme": "theme.css",
    "uplot": "uPlot.iife.min.js", "uplot_style": "uPlot.min.css",
}  # fmt: skip
"""Our own files, and the library's, that stand inside the page."""


def _embedded(data: Any) -> Markup:
    """JSON that cannot end the script element it stands in."""
    return Markup(json.dumps(data).replace("<", "\\u003c"))


def _phases(results: Path) -> list[tuple[str, list[Share]]]:
    """For each training, the time of each phase in a mean step."""
    found = {name: read_jsonl(results / f"{training}_metrics.jsonl") for training, name in TRAININGS.items()}
    bars = [(name, _shares(mean_phases(records))) for name, records in found.items() if records]
    return [(name, shares) for name, shares in bars if shares]


def _shares(seconds: Mapping[str, float], record: RunRecord | None = None) -> list[Share]:
    """The seconds as shares of the whole; shares below 0.1 % are left out."""
    states = {stage.name: stage.state for stage in record.stages} if record else {}
    whole = sum(seconds.values()) or 1.0
    shares = [Share(name, of, 100 * of / whole, states.get(name, "")) for name, of in seconds.items()]
    return [share for share in shares if share.percent >= 0.1]


def _samples(by_point: Sequence[Records]) -> list[SampleRow]:
    """Prompts whose answer changed between right and wrong first, then the rest."""
    rows = [
        SampleRow(
            records[0]["prompt"],
            str(records[0].get("answer") or ""),
            [(record["response"], (record["reward"] or 0) >= 1) for record in records],
        )
        for records in zip(*map(_first_answers, by_point), strict=True)
    ]
    changed = [row for row in rows if _changed(row)]
    steady = [row for row in rows if not _changed(row)]
    return [*changed[: SAMPLES * 3 // 4], *steady][:SAMPLES]


def _first_answers(records: Records) -> Records:
    """The first answer to each prompt."""
    return [record for record in records if record["sample"] == 0]


def _changed(row: SampleRow) -> bool:
    """Whether training, once begun, turned a right answer wrong or a wrong one right."""
    return len({right for _, right in row.responses[1:]}) > 1
