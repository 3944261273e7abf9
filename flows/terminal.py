"""A run on the terminal: a line per stage, progress bars where there is a screen, the job's own lines above them."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from rollouts_core.observe.evaluations import name_of
from rollouts_core.observe.run_records import RunRecord
from tasks.events import StageChanged, StageLine, StageProgress
from tasks.events import logger as events

machines = logging.getLogger("rollouts.machines")
MARKS = {"Completed": "[green]✓[/]", "Cached": "[blue]=[/]", "Failed": "[red]✗[/]", "Cancelled": "[yellow]✗[/]"}
SHOWN_METRICS = ("loss", "reward", "entropy", "completions/mean_length")
TRAINING = ("sft", "dpo", "rl-1")
PLAIN_SECONDS = 10.0
"""Seconds between lines of progress where there is no screen."""


@contextmanager
def stages_shown(quiet: bool = False) -> Iterator[Console]:
    """Show the stages of the flow that runs inside, unless it is to be `quiet`."""
    console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=quiet)
    bars = Progress(
        TextColumn("  {task.description:<14}"),
        BarColumn(bar_width=30),
        TextColumn("{task.completed:.0f}/{task.total:.0f}  {task.fields[note]}"),
        console=console,
        transient=True,
        disable=quiet or not has_screen(console),
    )
    handler = _Screen(console, bars)
    machines.setLevel(logging.INFO)
    for logger in (events, machines):
        logger.addHandler(handler)
    try:
        with bars:
            yield console
    finally:
        for logger in (events, machines):
            logger.removeHandler(handler)


class _Screen(logging.Handler):
    """Draws events as they come, and what machines have to say."""

    def __init__(self, console: Console, bars: Progress) -> None:
        super().__init__()
        self._console = console
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        self._told: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        match record.__dict__.get("event"):
            case StageChanged(name, state, seconds) if state in MARKS:
                if name in self._tasks:
                    self._bars.remove_task(self._tasks.pop(name))
                self._console.print(f"{MARKS[state]} {name:<14} {state.lower():<10} {seconds:7.1f} s")
            case StageLine(name, text):
                self._console.print(f"[dim]  {name:<14} {_escaped(text)}[/]")
            case StageProgress(name, done, total, metrics, _):
                note = "  ".join(f"{key.split('/')[-1]} {metrics[key]:.3f}" for key in SHOWN_METRICS if key in metrics)
                self._progress(name, done, total, note)
            case None:
                self._console.print(f"[dim]  {_escaped(record.getMessage())}[/]")

    def _progress(self, name: str, done: int, total: int, note: str) -> None:
        if not has_screen(self._console):
            if time.monotonic() - self._told.get(name, 0.0) > PLAIN_SECONDS:
                self._told[name] = time.monotonic()
                self._console.print(f"  {name:<14} {done}/{total}  {note}")
            return
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, note=note)
        self._bars.update(self._tasks[name], completed=done, note=note)


def print_record(record: RunRecord, console: Console | None = None) -> None:
    """The run's stages, accuracies and paths."""
    console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
    console.print(f"\n[bold]{record.run_id}[/]  {record.state.lower()} in {record.seconds:.1f} s")
    if record.error:
        console.print(f"[red]{_escaped(record.error)}[/]")
    if record.accuracies:
        table = Table("policy", "accuracy", "95 % interval", "prompts", title="Held-out accuracy", title_justify="left")
        for entry in record.accuracies:
            interval = f"{100 * entry.low:.1f} to {100 * entry.high:.1f} %"
            table.add_row(name_of(entry.point), f"{100 * entry.accuracy:.1f} %", interval, str(entry.total))
        console.print(table)
    if record.report:
        folder = record.report.rpartition("/")[0]
        policy = f"policy  {folder}/policy\n" if any(stage.name in TRAINING for stage in record.stages) else ""
        console.print(f"report  {record.report}\n{policy}metrics {folder}", soft_wrap=True)
    console.print(f"next    {_next(record)}", soft_wrap=True)


def _next(record: RunRecord) -> str:
    """The next step to suggest."""
    if record.state == "Completed":
        return f"open the report; `rollouts report {record.run_id} --against RUN` compares it with another run"
    if record.state == "Running":
        return f"`rollouts logs {record.run_id} -f` shows what its jobs print"
    return f"`rollouts logs {record.run_id}` shows all that was printed; the same command again goes on from there"


def has_screen(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")
