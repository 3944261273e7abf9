"""`rollouts report`: a run's page and its rollout viewer, written again, beside another run where that is asked for."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from flows.preflight import store_named
from rollouts_core.errors import BadInput
from rollouts_core.housekeeping.compare import compare_runs
from rollouts_core.observe.evaluations import Compared, compare_in_order, compare_with_run, read_evaluations
from rollouts_core.observe.report import Against, write_report
from rollouts_core.observe.run_list import find_run
from rollouts_core.observe.run_records import RunRecord
from rollouts_core.observe.viewer import write_viewer
from rollouts_core.store.store import Store


def report_command(options: argparse.Namespace) -> int:
    store = store_named(options.store)
    record = find_run(store.home, options.run)
    other = find_run(store.home, options.against) if options.against else None
    results = _results_of(record)
    points = [accuracy.point for accuracy in record.accuracies]
    compared = compare_in_order(results, points)
    if other:
        compared += _compared(results, other, points)
    viewer = write_viewer(results, record.run_id)
    config = json.loads((store.home / "runs" / record.run_id / "config.json").read_text())
    evaluated = read_evaluations(results, points)
    page = write_report(record, results, config, evaluated, compared, _against(store, record, other) if other else None)
    if options.json:
        print(json.dumps({"run_id": record.run_id, "report": str(page), "viewer": str(viewer) if viewer else None}))
        return 0
    print(f"report    {page}" + (f"\nrollouts  {viewer}" if viewer else ""))
    return 0


def _results_of(record: RunRecord) -> Path:
    results = Path(record.report).parent if record.report else None
    if results is None or not results.is_dir():
        raise BadInput(f"run {record.run_id} has no results to report: it is {record.state.lower()}")
    return results


def _compared(results: Path, other: RunRecord, points: Sequence[str]) -> Sequence[Compared]:
    """Curves can be laid beside each other where answers cannot: that they cannot is said."""
    try:
        return compare_with_run(results, _results_of(other), other.run_id, points)
    except BadInput as error:
        print(f"answers are not compared: {error}", file=sys.stderr)
        return ()


def _against(store: Store, record: RunRecord, other: RunRecord) -> Against:
    changes = [
        (change.name, str(change.one), str(change.other))
        for change in compare_runs(store, record.run_id, other.run_id)
        if change.part == "config"
    ]
    return Against(other.run_id, _results_of(other), changes)
