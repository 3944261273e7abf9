"""One job over several machines: the same command on each, one rendezvous, all or none.

Decision: a group is as many jobs as machines. Nothing new watches over them: each has its runner, and whoever follows
the group ends all of them when one ends badly, when one's machine is gone, or when it is no longer wanted.

The rendezvous is torchrun's, on a port of the first machine that the others reach by its `address`. It is the one thing
that does not stay on a loopback: it carries no secret, and belongs on a network of the machines' own.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from infra.errors import JobFailed, MachineError
from infra.follow import Lines
from infra.machine import Job, Machine, Offsets, Watched
from infra.ssh_machine import SSHMachine

LOOK_SECONDS = 0.1
QUEUE_SECONDS = 2.0
LAST_LINES = 15


@dataclass(frozen=True)
class Member:
    """One machine of a group, with its place in it."""

    rank: int
    machine: Machine
    job: Job


@dataclass(frozen=True)
class MemberLine:
    """A line that one machine's part has printed."""

    machine: str
    text: str


def claim_all(machines: Sequence[SSHMachine], deadline: float) -> Iterator[str]:
    """Lease all machines, or none: what was had is given back while one is waited for, so no two groups can block each
    other. Yields why it waits. Raises `MachineError` after `deadline` seconds.
    """
    end, said = time.monotonic() + deadline, ""
    while reason := _try_all(machines):
        if time.monotonic() > end:
            raise MachineError(f"{reason}; waited {deadline / 3600:g} hours")
        if reason != said:
            yield reason
            said = reason
        time.sleep(QUEUE_SECONDS)


def group_jobs(
    name: str, module: str, machines: Sequence[SSHMachine], port: int, processes: int, limits: Mapping[str, float]
) -> list[Member]:
    """A job for each machine: torchrun of `module` with `processes` per machine, meeting at a port of the first.

    The module is given the job's directory. `limits`: time_limit, unattended_limit and stall_limit, in seconds.
    """
    members = []
    first = machines[0].remote.host
    for rank, machine in enumerate(machines):
        command = (
            machine.python, "-m", "torch.distributed.run",
            f"--nnodes={len(machines)}", f"--node-rank={rank}", f"--nproc-per-node={processes}",
            f"--master-addr={first.address or first.host}", f"--master-port={port}", "--max-restarts=0",
            "-m", module, "{directory}",
        )  # fmt: skip
        spec: dict[str, Any] = {"rank": rank, "machines": [machine.name for machine in machines]}
        members.append(Member(rank, machine, Job(f"{name}-{rank}", command, spec, **limits)))
    return members


def run_group(members: Sequence[Member], patience: float) -> Iterator[MemberLine]:
    """Start all members, or none; yields what they print until all have ended well.

    `patience`: seconds that a machine may not answer. Raises `JobFailed` naming the machine whose part failed first.
    Whatever ends this, nothing of the group is left running on a machine that answers.
    """
    seen = {member.rank: Offsets() for member in members}
    try:
        for member in members:
            member.machine.start(member.job)
            seen[member.rank] = member.machine.attempt(member.job.name)
        yield from _followed(members, seen, patience)
    finally:
        for member in members:
            with suppress(MachineError):
                member.machine.cancel(member.job.name)


def _try_all(machines: Sequence[SSHMachine]) -> str:
    for number, machine in enumerate(machines):
        if reason := machine.try_claim([]):
            for had in machines[:number]:
                had.unclaim()
            return reason
    return ""


def _followed(members: Sequence[Member], seen: dict[int, Offsets], patience: float) -> Iterator[MemberLine]:
    running = {member.rank: member for member in members}
    lines = {member.rank: Lines() for member in members}
    last: dict[int, list[str]] = {member.rank: [] for member in members}
    heard = dict.fromkeys(running, time.monotonic())
    while running:
        for rank, member in list(running.items()):
            watched = member.machine.watch(member.job.name, seen[rank], LOOK_SECONDS)
            if watched.status.state == "unreachable":
                if time.monotonic() - heard[rank] > patience:
                    raise JobFailed(
                        f"{member.machine.name}: {watched.status.message}: the group has been ended", (), True
                    )
                continue
            heard[rank] = time.monotonic()
            seen[rank] = replace(seen[rank], log=seen[rank].log + len(watched.log))
            for line in lines[rank].take(watched.log):
                last[rank] = [*last[rank], line][-LAST_LINES:]
                yield MemberLine(member.machine.name, line)
            if watched.status.state != "running" and not watched.log:
                del running[rank]
                _refuse_failure(member, watched, last[rank])


def _refuse_failure(member: Member, watched: Watched, last: Sequence[str]) -> None:
    status = watched.status
    if status.state == "finished" and status.reason == "exited" and status.exit_status == 0:
        return
    how = "was killed" if status.state == "lost" else f"ended ({status.reason}, exit status {status.exit_status})"
    raise JobFailed(
        f"{member.machine.name}: its part of the group {how}; the others have been ended", tuple(last), True
    )
