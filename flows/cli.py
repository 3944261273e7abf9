"""The command line: `rollouts run | plan | runs | show`.

Only what a command needs is imported: `plan` answers in a fraction of a second and loads neither torch nor Prefect.
"""

import argparse
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from flows.preflight import check_inputs, named_store, place_store
from rollouts_core.config import PipelineConfig
from rollouts_core.config_files import load_config
from rollouts_core.errors import RolloutsError

INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0 only when it did what was asked."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except RolloutsError as error:
        print(f"error: {error}", file=sys.stderr)
        if options.json:
            print(json.dumps({"run_id": None, "state": "Failed", "error": str(error)}))
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def run_command(options: argparse.Namespace) -> int:
    config = _config(options)
    check_inputs(config)
    signal.signal(signal.SIGTERM, _interrupt)
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    from flows.post_train import post_train
    from flows.server import connect_prefect
    from flows.terminal import print_record, stages_shown
    from rollouts_core.observe.runs import list_runs

    connect_prefect()
    with stages_shown() as console:
        state = post_train(config, return_state=True)
    flow_run_id = str(state.state_details.flow_run_id)
    assert config.store.path is not None, "place_store decided it"
    record = next((run for run in list_runs(config.store.path) if run.flow_run_id == flow_run_id), None)
    if record is None or (record.error is None and not state.is_completed()):
        raise RolloutsError(str(state.result(raise_on_failure=False)))
    print_record(record, console if options.json else None)
    if options.json:
        print(json.dumps(asdict(record)))
    return 0 if state.is_completed() else 1


def plan_command(options: argparse.Namespace) -> int:
    from rollouts_core.stages.plan import plan
    from rollouts_core.store.local import LocalStore

    config = _config(options)
    assert config.store.path is not None, "place_store decided it"
    store = LocalStore(config.store.path)
    rows = [
        {"stage": stage.name, "key": stage.key, "state": "cached" if store.has(stage.artifact) else "to run"}
        for stage in plan(config).stages
    ]
    if options.json:
        print(json.dumps(rows))
        return 0
    for row in rows:
        print(f"{row['stage']:<16} {row['key'][:16]}  {row['state']}")
    return 0


def runs_command(options: argparse.Namespace) -> int:
    from rollouts_core.observe.runs import list_runs

    records = list_runs(_store(options))
    if options.json:
        print(json.dumps([asdict(record) for record in records]))
        return 0
    for record in records:
        accuracies = "  ".join(f"{entry.point} {100 * entry.accuracy:.1f} %" for entry in record.accuracies)
        print(f"{record.run_id:<40} {record.state:<10} {record.seconds:8.1f} s  {accuracies}")
    return 0


def show_command(options: argparse.Namespace) -> int:
    from rollouts_core.observe.runs import find_run

    record = find_run(_store(options), options.run)
    if options.json:
        print(json.dumps(asdict(record)))
        return 0
    from flows.terminal import print_record

    for stage in record.stages:
        print(f"{stage.name:<16} {(stage.key or '')[:16]:<16}  {stage.state:<10} {stage.seconds:8.1f} s")
    print_record(record)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rollouts", description="Post-train language models, stage by cached stage.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--store", type=Path, help="where artifacts and runs live (or ROLLOUTS_STORE)")
    shared.add_argument("--json", action="store_true", help="print JSON on standard output")
    configured = argparse.ArgumentParser(add_help=False, parents=[shared])
    configured.add_argument("config", type=Path, help="a Python file with `config = PipelineConfig(...)`, or JSON")
    configured.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="as in rl.steps=20")

    for name, command, parent, text in (
        ("run", run_command, configured, "run the whole chain"),
        ("plan", plan_command, configured, "say which stages are cached and which are to run"),
        ("runs", runs_command, shared, "list runs, the latest first"),
        ("show", show_command, shared, "show one run"),
    ):
        added = commands.add_parser(name, parents=[parent], help=text, description=text)
        added.set_defaults(command=command)
        if name == "show":
            added.add_argument("run", metavar="RUN", help="a run's id, or how it begins")
    return parser


def _config(options: argparse.Namespace) -> PipelineConfig:
    return place_store(load_config(options.config, options.set), options.config, options.store)


def _store(options: argparse.Namespace) -> Path:
    return named_store(options.store) or Path(".rollouts")


def _interrupt(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
