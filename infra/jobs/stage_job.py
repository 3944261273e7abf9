"""Stages as jobs: start the job that makes a stage, follow its output, and say how it ended.

A job may make several stages in one process (the segments of an RL run, the evaluations): each is waited for by its
own caller, and reading goes on where the caller before stopped.
"""

import json
import logging
import math
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from infra.errors import JobFailed, LeaseLapsed, MachineError, Unreachable
from infra.jobs.follow import LogLine, watching
from infra.jobs.ranks import meeting, peer_jobs, ranks_of, watch_peers
from infra.jobs.session import Cursor, Glimpse, MachineSession, Progress, Serving, Told, cancel_job
from infra.machines.machine import Job, JobStatus, Machine, Offsets, new_name
from infra.machines.ssh_machine import SSHMachine
from rollouts_core.errors import StoreUnavailable
from rollouts_core.rollout.glimpse import decode_glimpse
from rollouts_core.stages.job import EXIT_BAD_INPUT, EXIT_DISK_FULL, EXIT_TRY_AGAIN
from rollouts_core.stages.ranks import processes_of
from rollouts_core.stages.stage import Stage, stage_to_data
from rollouts_core.store.manifest import ArtifactId

POLL_SECONDS = 0.1
REMOTE_POLL_SECONDS = 2.0
STALL_LIMIT = 600.0
LIMIT_MARGIN = 120.0
"""Seconds by which the follower outlasts the job's own time limit."""

logger = logging.getLogger("rollouts.machines")


@dataclass
class Look:
    """Looks for an artifact now and then. A store that does not answer while the job runs is asked again later."""

    session: MachineSession
    _looked: float = -math.inf

    def has(self, artifact: ArtifactId, now: bool) -> bool:
        """Raises `StoreUnavailable` only where it is asked `now`."""
        interval = POLL_SECONDS if self.session.store.url is None else REMOTE_POLL_SECONDS
        if not now and time.monotonic() - self._looked < interval:
            return False
        try:
            return self.session.machine.has(artifact)
        except StoreUnavailable:
            if now:
                raise
            return False
        finally:
            self._looked = time.monotonic()


def make_in_job(stage: Stage, chain: Sequence[Stage], session: MachineSession) -> Iterator[LogLine | Told | Serving]:
    """Wait for a stage's artifact, made by the job of its chain, which is started unless it runs.

    Yields log lines, progress and glimpses as they come. Raises `JobFailed` when the job ended without the artifact.
    Whoever stops waiting (an interrupt, a cancellation, a timeout) ends the job; whoever is killed leaves it running.
    """
    found = frozenset(link.name for link in chain if session.has(link.artifact))
    job = stage_job(chain, session, found)
    machine = session.machine
    end = time.monotonic() + job.time_limit + LIMIT_MARGIN
    patience = session.settings.unreachable_limit_hours * 3600
    ended = False
    look = Look(session)
    try:
        if stage.name not in found:
            yield from _started(stage, job, [link for link in chain if link.name not in found], session)
        if job.name not in session.cursors:
            begun = machine.attempt(job.name)
            session.cursors[job.name] = Cursor(begun.log, begun.metrics, found)
        cursor = session.cursors[job.name]
        session.run.job(stage.name, machine.name, job.name, cursor.log)
        for seen in watching(machine, job.name, Offsets(cursor.log, cursor.metrics), patience):
            if isinstance(seen, LogLine):
                yield seen
                continue
            running = seen.status.state == "running"
            there = look.has(stage.artifact, now=not running)
            yield from _output_of(stage, cursor, seen.log, seen.metrics)
            if running and job.name in session.watches:
                yield from session.watches[job.name].look()
            if running:
                yield from _looked_after(job.name, session)
            if there:
                yield from _rest_of(stage, job.name, machine, cursor)
                ended = True
                return
            if not running and not seen.log and not seen.metrics:
                ended = True
                del session.cursors[job.name]
                if job.name in session.watches:
                    yield from session.watches[job.name].blame()
                raise failure_of(stage, seen.status, cursor.last_lines)
            if running and seen.status.message:  # it waits for its turn
                end = time.monotonic() + job.time_limit + LIMIT_MARGIN
            if time.monotonic() > end:
                raise MachineError(f"job {job.name} ran longer than its time limit of {job.time_limit:.0f} s")
            session.run.touch()
    except Unreachable:
        ended = True  # as far as this process can tell
        raise
    finally:
        if not ended and session.end(job, machine):
            logger.warning("ended job %s on %s; a retry goes on from what it has committed", job.name, machine.name)
        if not ended or job.name not in session.cursors:
            _end_ranks(job, session)


def _looked_after(job: str, session: MachineSession) -> Iterator[LogLine | Serving]:
    """Servers on other machines; the table of replicas is of the policy's."""
    for asked in session.asked(job):
        if pool := session.pools.get(asked):
            yield from (told for told in pool.look() if asked == job or isinstance(told, LogLine))


def _end_ranks(job: Job, session: MachineSession) -> None:
    for node, peer in enumerate(session.peers, 1):
        session.end(replace(job, name=ranks_of(job.name, node)), peer)


def _started(stage: Stage, job: Job, todo: Sequence[Stage], session: MachineSession) -> Iterator[LogLine]:
    """Start the job unless it runs, after sending what it needs."""
    machine = session.machine
    if machine.watch(job.name, Offsets(), 0.0).status.state == "running":
        if job.name not in session.cursors:
            yield LogLine(f"waiting: another run has started the job {job.name}; this run follows it")
    else:
        for node, peer in enumerate(session.peers, 1):
            cancel_job(ranks_of(job.name, node), peer)
        yield from map(LogLine, machine.supply(todo))
    for asked in session.asked(job.name):
        if service := session.services.get(asked):
            yield from map(LogLine, start_leased(service, machine, [job.name]))
    session.expect(stage.name, job, machine)
    yield from map(LogLine, start_leased(job, machine, [job.name]))
    if "group" in job.spec:
        for peer, ranks in zip(session.peers, peer_jobs(job, session.peers), strict=True):
            session.expect(stage.name, ranks, peer)
            yield from map(LogLine, start_leased(ranks, peer, [ranks.name]))
        session.watches[job.name] = watch_peers(session.peers, job.name)


def start_leased(job: Job, machine: Machine, jobs: Sequence[str]) -> Iterator[str]:
    """Start a job, claiming again where the lease has lapsed; `jobs` are those whose lease may be joined."""
    while True:
        try:
            machine.start(job)
            return
        except LeaseLapsed as error:
            yield str(error)
            yield from machine.claim(jobs)


def was_found(stage: Stage, chain: Sequence[Stage], session: MachineSession) -> bool:
    """Whether the artifact is in the store and this run had no part in making it."""
    cursor = session.cursors.get(job_name(chain))
    return session.has(stage.artifact) and (cursor is None or stage.name in cursor.found)


def job_name(chain: Sequence[Stage]) -> str:
    return chain[-1].artifact.directory


def stage_job(chain: Sequence[Stage], session: MachineSession, found: Collection[str] = ()) -> Job:
    """The job that makes, in one process, those stages of a chain that are not found already."""
    machine = session.machine
    spec = {
        "stages": [stage_to_data(machine.placed(stage)) for stage in chain if stage.name not in found],
        "store": machine.places,
        "device": session.settings.device,
        "served": session.beside,
    }
    if session.peers and (processes := max(map(processes_of, chain))) > 1:
        assert isinstance(machine, SSHMachine), "peers are of a machine of the inventory"
        spec["group"] = meeting(machine, session.peers, processes)
    return Job(
        name=job_name(chain),
        command=(machine.python, "-m", "rollouts_core.stages.job", "{directory}"),
        spec=spec,
        time_limit=session.settings.time_limit_hours * 3600,
        unattended_limit=session.settings.unattended_limit_hours * 3600,
        stall_limit=STALL_LIMIT,
        asked_by=(new_name(), *([session.asked_by] if session.asked_by else [])),
    )


def _output_of(stage: Stage, cursor: Cursor, log: bytes, metrics: bytes) -> list[LogLine | Told]:
    """The new output of this stage. Output of other stages is kept for them."""
    output = [*cursor.ahead, *_taken_in(cursor, log, metrics)]
    others = {id(event) for event in output if isinstance(event, Told) and event.stage != stage.name}
    cursor.ahead = [event for event in output if id(event) in others]
    return [event for event in output if id(event) not in others]


def _rest_of(stage: Stage, job: str, machine: Machine, cursor: Cursor) -> Iterator[LogLine | Told]:
    """The output that the job wrote before its artifact was published."""
    while True:
        watched = machine.watch(job, Offsets(cursor.log, cursor.metrics), 0.0)
        if not watched.log and not watched.metrics:
            return
        yield from _output_of(stage, cursor, watched.log, watched.metrics)


def _taken_in(cursor: Cursor, log: bytes, metrics: bytes) -> Iterator[LogLine | Told]:
    cursor.log += len(log)
    cursor.metrics += len(metrics)
    for line in cursor.lines.take(log):
        cursor.last_lines.append(line)
        yield LogLine(line)
    for line in cursor.records.take(metrics):
        yield _told(json.loads(line))


def _told(record: dict[str, Any]) -> Told:
    if "rollouts" in record:
        return Glimpse(record["stage"], record["step"], decode_glimpse(record["rollouts"]))
    metrics = {name: value for name, value in record.items() if name not in ("step", "stage", "done", "total")}
    return Progress(record["stage"], record["done"], record["total"], metrics, record["step"])


def failure_of(stage: Stage, status: JobStatus, last_lines: Iterable[str]) -> JobFailed:
    """How a job that has ended without its artifact is told."""
    lines = tuple(last_lines)
    if status.state == "absent":
        return JobFailed(
            f"stage {stage.name}: its job wrote nothing; the disk of its machine may be full", lines, False
        )
    if status.state == "lost":
        return JobFailed(f"stage {stage.name}: {status.message or 'its job was killed'}", lines, mendable=True)
    if status.reason == "stalled":
        return JobFailed(f"stage {stage.name}: its job hung for {STALL_LIMIT:.0f} s", lines, mendable=True)
    if status.reason != "exited":
        return JobFailed(f"stage {stage.name}: its job was ended ({status.reason})", lines, mendable=False)
    code = status.exit_status or 0
    if code < 0:
        return JobFailed(f"stage {stage.name}: its job was killed by signal {-code}", lines, mendable=True)
    if code in (EXIT_BAD_INPUT, EXIT_DISK_FULL) and status.message:
        return JobFailed(f"stage {stage.name}: {status.message}", (), mendable=False)
    message = status.message or f"its job ended with exit status {code}"
    return JobFailed(f"stage {stage.name}: {message}", lines, mendable=code == EXIT_TRY_AGAIN)
