"""Jobs that build environments, followed to their end."""

from collections.abc import Generator, Iterator

from infra.errors import JobFailed
from infra.jobs.follow import Lines, LogLine, watching
from infra.jobs.session import MachineSession
from infra.machines.machine import Job, JobStatus, Machine
from infra.machines.ssh_machine import SSHMachine

BUILD_SECONDS = 3600.0
LAST_LINES = 15
QUIET = ""
"""Yielded where a build has printed nothing for a moment: whoever follows it may do something else."""


def followed_build(machine: Machine, job: Job, session: MachineSession, stage: str, what: str) -> Iterator[str]:
    """Start a job that builds an environment, unless it runs; yields its lines, and `QUIET` between them.

    Another run that waits for the same build may stop waiting, which ends it: then it is started again.
    Raises `JobFailed` with the build's last lines.
    """
    while True:
        session.expect(stage, job, machine)
        if isinstance(machine, SSHMachine):
            machine.start_beside(job)
        else:
            machine.start(job)
        status, last = yield from _followed(machine, job)
        session.forget(job, machine)
        if status.reason == "cancelled":
            yield f"what another run has ended is started again: {what}"
            continue
        if status.exit_status != 0:
            raise JobFailed(f"{machine.name}: {what} could not be built", last, mendable=False)
        return


def _followed(machine: Machine, job: Job) -> Generator[str, None, tuple[JobStatus, tuple[str, ...]]]:
    """Yields its lines; returns how it ended, and the last of them."""
    lines, last = Lines(), list[str]()
    for seen in watching(machine, job.name, machine.attempt(job.name), BUILD_SECONDS):
        if isinstance(seen, LogLine):
            yield seen.text
            continue
        new = lines.take(seen.log)
        last = [*last, *new][-LAST_LINES:]
        yield from new or [QUIET]
        if seen.status.state != "running" and not seen.log:
            return seen.status, tuple(last)
    raise AssertionError("following ends with the job")
