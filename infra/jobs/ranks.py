"""Training over several machines: the job that makes the stages on one, a job of ranks on each of the others.

Decision: a group has a job on each machine. Nothing new watches over them: each has its runner, ranks end when their
connection to rank 0 does, and the process that follows the first job also watches the others and ends all when one is
gone.

The ranks meet on a port of the first machine, which the others reach by its `address`, and use that network for their
messages. It is the only traffic that does not stay on a loopback: it carries no secret, and belongs on a private
network of the machines.
"""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from infra.errors import JobFailed
from infra.jobs.follow import Lines, LogLine
from infra.machines.machine import Job, JobStatus, Offsets
from infra.machines.ssh_machine import SSHMachine
from rollouts_core.stages.job import EXIT_BAD_INPUT
from rollouts_core.stages.ranks import ENDED_BY, Group

LOOK_SECONDS = 2.0
AWAY_SECONDS = 600.0
"""A machine that has not answered for so long, while the first one does, is taken to be gone."""
END_SECONDS = 15.0
"""How long the ranks of one machine may take to notice that those of another are gone."""
UNDECIDED = ("running", "unreachable")
LAST_LINES = 15
PORTS = range(20000, 32000)
"""Ports below those that systems use for outgoing connections."""


def meeting(first: SSHMachine, peers: Sequence[SSHMachine], processes: int) -> dict[str, object]:
    """The group as the first machine's job is told of it: `group_of` reads it there."""
    return asdict(Group(processes, 1 + len(peers), 0, first.address, secrets.choice(PORTS)))


def ranks_of(job: str, node: int) -> str:
    """The name of the job of ranks that belongs to a job; its machine is that of this number, counted from 0."""
    return f"{job}-ranks-{node}"


def peer_jobs(job: Job, peers: Sequence[SSHMachine]) -> list[Job]:
    """The jobs of the other machines. `job` is the first machine's, whose spec has the group."""
    return [
        replace(
            job,
            name=ranks_of(job.name, node),
            command=(peer.python, *job.command[1:]),
            spec={"stages": [], "device": job.spec["device"], "group": {**job.spec["group"], "node": node}},
        )
        for node, peer in enumerate(peers, 1)
    ]


def watch_peers(peers: Sequence[SSHMachine], job: str) -> "PeerWatch":
    """Watch the other machines, from the beginning of their current attempts' output; `job` is the first machine's."""
    ranks = {peer.name: ranks_of(job, node) for node, peer in enumerate(peers, 1)}
    return PeerWatch(peers, ranks, {peer.name: peer.attempt(ranks[peer.name]) for peer in peers})


@dataclass
class PeerWatch:
    """Looks now and then how the ranks on the others are."""

    peers: Sequence[SSHMachine]
    jobs: Mapping[str, str]
    """The ranks' jobs, by machine."""
    _seen: dict[str, Offsets]
    """How far what each has printed is read."""
    _lines: dict[str, Lines] = field(default_factory=dict)
    _last: dict[str, list[str]] = field(default_factory=dict)
    _heard: dict[str, float] = field(default_factory=dict)
    _looked: float = 0.0

    def look(self, now: bool = False) -> Iterator[LogLine]:
        """The lines of the other machines. Raises `JobFailed` naming the machine whose ranks are gone."""
        if not now and time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        for peer in self.peers:
            yield from self._look(peer)

    def blame(self) -> Iterator[LogLine]:
        """Look for a cause on the other machines, once the first machine's job has failed. Gives their jobs time to
        end."""
        end = time.monotonic() + END_SECONDS
        while waiting := [status for peer in self.peers if (status := self._status(peer)).state in UNDECIDED]:
            if time.monotonic() > end:
                break
            time.sleep(LOOK_SECONDS / 10)
        yield from self.look(now=True)
        for status in waiting:
            if status.state == "unreachable":
                yield from _fail(status.message, [])

    def _look(self, peer: SSHMachine) -> Iterator[LogLine]:
        at = self._seen[peer.name]
        lines, last = self._lines.setdefault(peer.name, Lines()), self._last.setdefault(peer.name, [])
        heard = self._heard.setdefault(peer.name, time.monotonic())
        watched = peer.watch(self.jobs[peer.name], at, 0.0)
        if watched.status.state == "unreachable":
            if time.monotonic() - heard > AWAY_SECONDS:
                yield from _fail(watched.status.message, last)
            return
        self._heard[peer.name] = time.monotonic()
        self._seen[peer.name] = Offsets(at.log + len(watched.log), at.metrics)
        for line in lines.take(watched.log):
            last[:] = [*last, line][-LAST_LINES:]
            yield LogLine(f"{peer.name}: {line}")
        if watched.status.exit_status == EXIT_BAD_INPUT:
            raise JobFailed(f"{peer.name}: {watched.status.message}; the group has been ended", (), mendable=False)
        if how := _gone(watched.status):
            yield from _fail(f"{peer.name}: {how}", last)

    def _status(self, peer: SSHMachine) -> JobStatus:
        return peer.watch(self.jobs[peer.name], self._seen[peer.name], 0.0).status


def _fail(what: str, last: Sequence[str]) -> Iterator[LogLine]:
    """Report it at once: if a retry succeeds, nobody sees the error later."""
    message = f"{what}; the group has been ended"
    yield LogLine(message)
    raise JobFailed(message, tuple(last), mendable=True)


def _gone(status: JobStatus) -> str:
    """How ranks were lost, those apart that ended because others had; empty where they were not."""
    if status.state in ("lost", "absent"):
        return "its ranks were killed"
    if status.state == "finished" and status.reason != "exited":
        return f"its ranks were ended ({status.reason})"
    return status.message if ENDED_BY in status.message else ""
