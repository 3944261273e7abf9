"""`rollouts plan --estimate`: what a config will take, stage by stage, and whether its machine has that."""

import argparse
import json
import sys
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from flows.preflight import store_of
from rollouts_core.config import MachineConfig, PipelineConfig
from rollouts_core.memory import GIB, machine_bytes
from rollouts_core.stages.estimate import Estimate, estimate, misfit, runs_on_gpu
from rollouts_core.stages.plan import plan


def print_estimate(config: PipelineConfig, options: argparse.Namespace) -> int:
    """Exit status 1 when something does not fit."""
    estimates = estimate(config, plan(config), store_of(config))
    memory = memory_of(config.machine)
    problems = misfit(estimates, memory) if memory else []
    if options.json:
        told = [{**asdict(entry), "peak": entry.peak} for entry in estimates]
        print(json.dumps({"memory": memory, "stages": told, "problems": problems}))
    else:
        _print(estimates, memory)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def memory_of(machine: MachineConfig) -> int | None:
    """Bytes that a stage's process may have there; None where that is not known before the machine is leased."""
    if runs_on_gpu(machine):
        return int(machine.gpu_memory_gb * 1e9) or None
    return machine_bytes() if machine.kind == "local" else None


def _print(estimates: list[Estimate], memory: int | None) -> None:
    table = Table("stage", "peak memory", "tokens", "time", "taken from", box=None, padding=(0, 2, 0, 0))
    for entry in estimates:
        if entry.cached:
            table.add_row(entry.stage, "", "", "cached", "")
            continue
        table.add_row(
            entry.stage,
            f"{entry.peak / GIB:.2f} GiB" if entry.parts else "",
            f"{entry.tokens:,}" if entry.tokens else "",
            _time(entry.seconds),
            entry.basis,
        )
    console = Console(highlight=False)
    console.print(table, soft_wrap=True)
    known = [entry.seconds for entry in estimates if entry.seconds is not None]
    together = f"together {_time(sum(known))}" if known else "time not known"
    machine = f"the machine has {memory / GIB:.1f} GiB" if memory else "the machine's memory is not known here"
    console.print(f"{together}; {machine}")


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
