"""Many similar stages, made by one job array of a Slurm cluster: each is a job, on any free node.

Decision: there is one submission, and Slurm decides which job runs when. The jobs are ordinary ones: if the same stages
are asked for again, running jobs are followed and missing ones submitted.
"""

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from infra.errors import Unreachable
from infra.jobs.follow import AWAY_SECONDS, Lines, LogLine
from infra.jobs.session import LAST_LINES, MachineSession, Progress
from infra.jobs.stage_job import failure_of, stage_job
from infra.machines.machine import Job, Offsets, Watched
from infra.machines.ssh_machine import SSHMachine
from rollouts_core.stages.stage import Stage

LOOK_SECONDS = 0.5


@dataclass
class _Element:
    """A stage of the array, and how far its job's output has been read."""

    stage: Stage
    job: Job
    at: Offsets
    lines: Lines = field(default_factory=Lines)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    waits: str | None = None
    """What the job waits for; empty while it runs, None once its artifact is here."""


def make_in_array(
    name: str, stages: Sequence[Stage], session: MachineSession, at_once: int | None
) -> Iterator[LogLine | Progress]:
    """Make stages in a job array on the session's cluster, and bring their artifacts here. `name`: of the whole stage.

    Raises `JobFailed` with the last lines of the first that failed; then, and when whoever waits is interrupted, the
    others are ended.
    """
    machine = session.machine
    assert isinstance(machine, SSHMachine), "an array is of a cluster"
    jobs = [stage_job([stage], session) for stage in stages]
    for job in jobs:
        session.expect(name, job, machine)
    ended = False
    try:
        yield from map(LogLine, machine.supply(stages))
        yield from map(LogLine, machine.start_array(jobs, at_once))
        elements = [
            _Element(stage, job, machine.attempt(job.name), waits="it begins")
            for stage, job in zip(stages, jobs, strict=True)
        ]
        yield from _followed(name, elements, machine, session)
        ended = True
    except Unreachable:
        ended = True  # as far as this process can tell
        raise
    finally:
        for job in jobs if not ended else []:
            session.end(job, machine)
    for job in jobs:
        session.forget(job, machine)


def _followed(
    name: str, elements: Sequence[_Element], machine: SSHMachine, session: MachineSession
) -> Iterator[LogLine | Progress]:
    patience, heard, said = session.settings.unreachable_limit_hours * 3600, time.monotonic(), ""
    while left := [element for element in elements if element.waits is not None]:
        for element in left:
            watched = machine.watch(element.job.name, element.at, 0.0)
            if watched.status.state == "unreachable":
                if time.monotonic() - heard > patience:
                    raise Unreachable(watched.status.message)
                time.sleep(AWAY_SECONDS)
                break
            heard = time.monotonic()
            yield from _taken_in(element, watched, machine)
            if element.waits is None:
                done = sum(element.waits is None for element in elements)
                yield Progress(name, done, len(elements), {})
        if (told := _summary(elements)) != said:
            said = told
            yield LogLine(told)
        session.run.touch()
        time.sleep(LOOK_SECONDS)


def _taken_in(element: _Element, watched: Watched, machine: SSHMachine) -> Iterator[LogLine]:
    element.at = Offsets(element.at.log + len(watched.log), element.at.metrics + len(watched.metrics))
    for line in element.lines.take(watched.log):
        element.last.append(line)
        yield LogLine(f"{element.stage.name}: {line}")
    if watched.status.state == "running":
        element.waits = watched.status.message
        return
    if watched.log:
        return
    if not machine.has(element.stage.artifact):
        raise failure_of(element.stage, watched.status, element.last)
    machine.keep(element.stage.artifact)
    element.waits = None


def _summary(elements: Sequence[_Element]) -> str:
    """How many wait, run and are done."""
    waiting = Counter(element.waits.partition(": ")[2].partition(",")[0] for element in elements if element.waits)
    running = sum(element.waits == "" for element in elements)
    reasons = ", ".join(reason for reason in sorted(waiting) if reason)
    waits = f"{waiting.total()} wait{f' ({reasons})' if reasons else ''}"
    done = len(elements) - running - waiting.total()
    return f"of {len(elements)} parts, {waits}, {running} run, {done} are done"
