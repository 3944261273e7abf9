"""The commands that look at the jobs of a run, here or on other machines: logs, cancel.

Decision: both ask the machines, not the orchestrator, so they work after it has ended.
"""

import argparse
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from flows.preflight import store_named
from infra.jobs.follow import Lines, LogLine, watching
from infra.machines.machine import Machine, Offsets
from infra.provisioning.provision import reach_machine
from rollouts_core.errors import BadInput, RolloutsError
from rollouts_core.observe.run_list import find_run
from rollouts_core.observe.run_records import JobRecord, RunRecord
from rollouts_core.store.locks import born
from rollouts_core.store.store import Store

PATIENCE = 3600.0
BEYOND = 2**40
"""An offset where no file of metrics has anything."""
LOOK_SECONDS = 0.5
CANCEL_SECONDS = 120.0


def print_logs(options: argparse.Namespace) -> int:
    """Print the lines that the jobs of a run, or of one of its stages, have printed; with -f also those to come."""
    store = store_named(options.store)
    record = find_run(store.home, options.run)
    if options.stage and options.stage not in [stage.name for stage in record.stages]:
        names = ", ".join(stage.name for stage in record.stages)
        raise BadInput(f"run {record.run_id} has no stage {options.stage!r}; there are {names}")
    told: set[tuple[str, str]] = set()
    while True:
        for job in [job for job in jobs_of(record, options.stage) if (job.machine, job.job) not in told]:
            told.add((job.machine, job.job))
            with reach_machine(job.machine, store) as machine:
                for line in _lines(machine, job, options.follow):
                    print(json.dumps({"stage": job.stage, "line": line}) if options.json else line, flush=True)
        record = find_run(store.home, record.run_id)
        more = [job for job in jobs_of(record, options.stage) if (job.machine, job.job) not in told]
        if not more and (not options.follow or record.state != "Running"):
            return 0
        time.sleep(LOOK_SECONDS)


def cancel_run(options: argparse.Namespace) -> int:
    """End the run: its orchestrator, if that is alive, and every job it started, wherever they run."""
    store = store_named(options.store)
    record = find_run(store.home, options.run)
    if record.state == "Running":
        _end_orchestrator(record, store)
    ended = []
    for job in jobs_of(record):
        with reach_machine(job.machine, store) as machine:
            was = machine.watch(job.job, Offsets(), 0.0).status.state
            if was == "unreachable":
                raise RolloutsError(f"{job.machine} does not answer: {job.job} may run on there; cancel again later")
            machine.cancel(job.job)
            if was == "running":
                ended.append(f"{job.job} on {job.machine}")
            if machine.watch(job.job, Offsets(), 0.0).status.state == "running":
                raise RolloutsError(f"{job.job} on {job.machine} does not end")
    if options.json:
        print(json.dumps({"run_id": record.run_id, "ended": ended}))
        return 0
    print("\n".join([f"ended {name}" for name in ended] or ["nothing of it was running any more"]))
    return 0


def jobs_of(record: RunRecord, stage: str | None = None) -> Sequence[JobRecord]:
    """The jobs of a run, or of one of its stages, each once, from where the run's part of the job's log begins."""
    found: dict[tuple[str, str], JobRecord] = {}
    for job in record.jobs:
        if stage in (None, job.stage):
            first = found.setdefault((job.machine, job.job), job)
            begins = [log for log in (first.log, job.log) if log is not None]
            found[job.machine, job.job] = replace(first, log=min(begins, default=None))
    return list(found.values())


def _lines(machine: Machine, job: JobRecord, follow: bool) -> Iterator[str]:
    lines = Lines()
    begins = machine.attempt(job.job).log if job.log is None else job.log
    for seen in watching(machine, job.job, Offsets(log=begins, metrics=BEYOND), PATIENCE):
        if isinstance(seen, LogLine):
            yield seen.text
            continue
        yield from lines.take(seen.log)
        if not seen.log and not (follow and seen.status.state == "running"):
            if lines.rest:
                yield lines.rest.decode(errors="replace")
            return


def _end_orchestrator(record: RunRecord, store: Store) -> None:
    """Ask it to end, which ends its jobs as well, and wait until it has."""
    pid, since = record.process
    if not pid or born(pid) != since:
        raise BadInput(f"run {record.run_id} is led by a process on another machine: cancel it there")
    os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + CANCEL_SECONDS
    while find_run(store.home, record.run_id).state == "Running":
        if time.monotonic() > end:
            raise RolloutsError(
                f"process {pid}, which leads {record.run_id}, has not ended {CANCEL_SECONDS:.0f} s after"
            )
        time.sleep(LOOK_SECONDS)
