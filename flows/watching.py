"""`rollouts watch`: a run's stages, progress and curves on the terminal, while it runs and after.

Decision: like `logs`, it asks the run's record and the machines of its jobs, not the orchestrator. So it works in any
terminal, for runs on other machines, and after the orchestrator has ended.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flows.following import jobs_of
from flows.preflight import store_named
from flows.terminal import MARKS, has_screen, print_record
from infra.jobs.follow import Lines
from infra.machines.machine import Machine, Offsets
from infra.provisioning.provision import reach_machine
from rollouts_core.metrics.sparkline import sparkline
from rollouts_core.observe.replica_table import COLUMNS, replica_rows
from rollouts_core.observe.run_list import find_run
from rollouts_core.observe.run_records import RunRecord, seconds_so_far

LOOK_SECONDS = 1.0
PLAIN_SECONDS = 10.0
"""Seconds between lines of news where there is no screen."""
BEYOND = 2**40
CURVES = {
    "sft": ("loss", "grad_norm"),
    "dpo": ("loss", "rewards/accuracies"),
    "rl": ("reward", "entropy", "completions/mean_length", "sampling/mismatch_kl"),
}
SPEEDS = ("perf/tokens_per_second", "perf/mfu", "gpu/utilization", "gpu/memory_gib", "timing_s/step")
WIDTH = 48


@dataclass
class _Followed:
    """A job's metrics, as far as they are read."""

    machine: Machine
    at: int
    lines: Lines = field(default_factory=Lines)


@dataclass
class _Seen:
    """What is known of a run from its jobs: metrics of each training's steps, and the progress of each stage."""

    records: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    progress: dict[str, tuple[int, int]] = field(default_factory=dict)
    replicas: dict[tuple[str, str], list[dict[str, Any]]] = field(default_factory=dict)
    """Replicas, by the machine and job that report them."""
    last: dict[str, float] = field(default_factory=dict)
    """All metrics of the last step."""

    def take(self, job: tuple[str, str], record: dict[str, Any]) -> None:
        if "replicas" in record:
            self.replicas[job] = record["replicas"]
        if "rollouts" in record or "stage" not in record:
            return
        stage, self.last = record["stage"], record
        self.progress[stage] = record["done"], record["total"]
        training = stage.partition("-")[0]
        shown = {name: record[name] for name in (*CURVES.get(training, ()), *SPEEDS) if name in record}
        if shown:
            self.records.setdefault(training, []).append(shown)


def watch_command(options: argparse.Namespace) -> int:
    """Show a run until it has ended. With --json, print each record of metrics as a line."""
    store = store_named(options.store)
    record = find_run(store.home, options.run)
    console, seen = Console(highlight=False), _Seen()
    screen = has_screen(console) and not options.json
    followed: dict[tuple[str, str], _Followed] = {}
    told = time.monotonic() - PLAIN_SECONDS
    with ExitStack() as open_machines:
        live = open_machines.enter_context(Live(console=console, auto_refresh=False)) if screen else None
        while True:
            for job in jobs_of(record):
                if (name := (job.machine, job.job)) not in followed:
                    machine = open_machines.enter_context(reach_machine(job.machine, store))
                    followed[name] = _Followed(machine, machine.attempt(job.job).metrics)
            for name, one in followed.items():
                for new in _new(one, name[1]):
                    seen.take(name, new)
                    if options.json:
                        print(json.dumps(new), flush=True)
            if live:
                live.update(_page(record, seen), refresh=True)
            elif not options.json and (time.monotonic() - told >= PLAIN_SECONDS or record.state != "Running"):
                told = time.monotonic()
                console.print(_line(record, seen), soft_wrap=True)
            if record.state != "Running":
                break
            time.sleep(LOOK_SECONDS)
            record = find_run(store.home, record.run_id)
    if not options.json:
        print_record(record)
    return 0


def _new(followed: _Followed, job: str) -> Iterator[dict[str, Any]]:
    seen = followed.machine.watch(job, Offsets(log=BEYOND, metrics=followed.at), 0.0)
    followed.at += len(seen.metrics)
    yield from map(json.loads, followed.lines.take(seen.metrics))


def _page(record: RunRecord, seen: _Seen) -> Group:
    stages = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for stage in record.stages:
        done, total = seen.progress.get(stage.name, (0, 0))
        now = f"{done}/{total}" if stage.state == "Running" and total else ""
        seconds = f"{stage.seconds:.1f} s" if stage.seconds else now
        stages.add_row(MARKS.get(stage.state, "[dim]·[/]"), stage.name, stage.state.lower(), seconds)
    curves = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for training, records in seen.records.items():
        for name in CURVES[training]:
            if values := [entry[name] for entry in records if name in entry]:
                curves.add_row(f"{training} {name}", sparkline(values, WIDTH), f"{values[0]:.4g} → {values[-1]:.4g}")
    replicas = Table(*COLUMNS, box=None, padding=(0, 2, 0, 0), header_style="dim")
    for row in replica_rows(_serving(seen), seen.last):
        replicas.add_row(*row.values())
    title = Text.assemble((record.run_id, "bold"), f"  {record.state.lower()}  {_age(record)}")
    shown = [replicas] if replicas.rows and record.state == "Running" else []
    return Group(title, stages, curves, *shown, Text(_speeds(seen)))


def _serving(seen: _Seen) -> list[dict[str, Any]]:
    """The replicas as the trainer knows them. The pool reports those of other machines, and so do these machines' own
    jobs."""
    told = [replica for replicas in seen.replicas.values() for replica in replicas]
    return [replica for replica in told if "machine" in replica] or told


def _line(record: RunRecord, seen: _Seen) -> str:
    running = [stage.name for stage in record.stages if stage.state == "Running"]
    how_far = [f"{name} {seen.progress[name][0]}/{seen.progress[name][1]}" for name in running if name in seen.progress]
    last = [
        f"{training} {name} {records[-1][name]:.4g}"
        for training, records in seen.records.items()
        for name in CURVES[training]
        if name in records[-1]
    ]
    return "  ".join([record.state.lower(), _age(record), *(how_far or running), *last])


def _speeds(seen: _Seen) -> str:
    """Speeds of the last step of the current training."""
    last: Sequence[dict[str, float]] = [*seen.records.values()][-1][-1:] if seen.records else []
    return "  ".join(f"{name} {entry[name]:.4g}" for entry in last for name in SPEEDS if name in entry)


def _age(record: RunRecord) -> str:
    seconds = seconds_so_far(record)
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
