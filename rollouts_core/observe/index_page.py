"""`outputs/index.html`: all runs with their state, accuracies and a small curve, filtered, any two side by side.

Decision: one self-contained file, as the reports are, written again when something has changed. It holds the latest
runs only, so that it opens at once after years of them.
"""

import json
import os
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from rollouts_core.observe.assets import asset
from rollouts_core.observe.evaluations import name_of
from rollouts_core.observe.listed import Listed, listed_runs
from rollouts_core.observe.run_records import seconds_so_far

MOST = 500


def write_index(home: Path, outputs: Path) -> Path:
    """Returns the page. `home` is the store's, `outputs` where results are."""
    rows = [_row(listed, outputs) for listed in listed_runs(home, outputs, MOST)]
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    page = templates.get_template("index.html.j2").render(
        rows=Markup(json.dumps(rows).replace("<", "\\u003c")),
        most=MOST,
        theme=Markup(asset("theme.css")),
        style=Markup(asset("report.css")),
        script=Markup(asset("index.js")),
    )
    outputs.mkdir(parents=True, exist_ok=True)
    unfinished = outputs / f".index.html.{os.getpid()}"
    unfinished.write_text(page)
    unfinished.replace(outputs / "index.html")
    return outputs / "index.html"


def _row(listed: Listed, outputs: Path) -> dict[str, object]:
    record = listed.record
    return {
        "id": record.run_id,
        "name": record.name,
        "state": record.state,
        "started": record.started_at[:19].replace("T", " "),
        "seconds": seconds_so_far(record),
        "accuracies": [
            [
                name_of(entry.point),
                f"{100 * entry.accuracy:.1f} %",
                f"{100 * entry.low:.1f} to {100 * entry.high:.1f} %",
            ]
            for entry in record.accuracies
        ],
        "stage": next((stage.name for stage in record.stages if stage.state == "Running"), ""),
        "page": (outputs / record.run_id / "report.html").is_file(),
        "curve": listed.curve,
        "values": listed.values,
    }
