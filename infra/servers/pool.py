"""Servers on other machines than the trainer's: leased, started, connected with the trainer, and looked after.

Decision: the trainer's machine and the servers' machines need no orchestrator between them. A job beside the trainer's
keeps the connections (`infra.host.pool`); a job on each other machine keeps its servers and the one port through which
they are reached (`infra.host.servers`). This module decides which machines belong together. If the orchestrator ends,
they go on.

Decision: a machine that joins and one that comes back are the same case. Each is prepared as far as possible: leased,
given an environment and a model without weights, its servers started, its address told to the trainer. A step that
fails is tried again later, and reported once.
"""

import json
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from infra.errors import JobFailed, LeaseLapsed, Unreachable
from infra.host.keeping import HANDED
from infra.host.relay import ONWARD
from infra.jobs.follow import LogLine
from infra.jobs.placing import leased_gpus
from infra.jobs.reader import JobReader
from infra.jobs.session import MachineSession, Serving
from infra.jobs.stage_job import start_leased
from infra.machines.check import refuse_unfit
from infra.machines.machine import Job
from infra.machines.ssh_machine import SSHMachine
from infra.python_envs.build import QUIET
from infra.python_envs.engine import engine_python, host_command
from infra.python_envs.trainer import prepare_environment
from infra.servers.capacity import replicas_on
from infra.servers.frame import send_frame
from infra.servers.job import SERVICE_SECONDS, UNATTENDED_SECONDS, label_of, pool_name, serve_job, service_name
from infra.servers.model import model_of
from infra.servers.packages import packages_of
from infra.servers.tree import onward
from rollouts_core.config import EngineConfig, placement_of
from rollouts_core.errors import BadInput, RolloutsError
from rollouts_core.network import own_address
from rollouts_core.stages.specs import ServeSpec
from rollouts_core.stages.stage import Stage
from rollouts_core.store.keys import key_of

LOOK_SECONDS = 2.0
AGAIN_SECONDS = (1.0, 5.0, 20.0)
"""Seconds before another attempt on a machine that failed: the first, the second, and all later ones."""
ENDED = ("lost", "absent", "finished")


@dataclass
class _Member:
    """A machine that has servers, or may have."""

    machine: SSHMachine
    replicas: int = 0
    reader: JobReader | None = None
    """The reader of the job that keeps its servers, once that was started."""
    host_key: str = ""
    """The machine's host key when its servers were started."""
    handed: str = ""
    """The keys that its servers' job was given."""
    below: list[dict[str, Any]] = field(default_factory=list)
    """The machines that it was told to pass weights on to."""
    failures: int = 0
    """Since its servers ran last."""
    again: float = 0.0
    """When it is looked at next."""
    said: str = ""
    last: list[str] = field(default_factory=list)
    """The last lines of servers that have ended there."""
    key: str = ""
    """Says what its servers are; servers with the same key can replace each other."""
    beginning: Iterator[str] | None = None
    """The work that is under way on the machine before its servers are started."""

    def failed(self) -> None:
        """Leave a machine alone for a while after a failure."""
        self.again = time.monotonic() + AGAIN_SECONDS[min(self.failures, len(AGAIN_SECONDS) - 1)]
        self.failures += 1


@dataclass
class EnginePool:
    """The machines that generate for one trainer."""

    config: EngineConfig
    segment: Stage
    """The first segment that is still to be made."""
    chain: str
    """The name of the trainer's job."""
    session: MachineSession
    members: list[_Member]
    links: JobReader
    """The reader of the job that keeps the connections."""
    _described: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The machines whose servers can be reached, by name, in the form of `infra.host.links.Machine`."""
    _told: str = ""
    """The machines as the trainer's side knows them."""
    _looked: float = 0.0
    _ready: str = ""
    _shown: Any = None

    def start(self) -> Iterator[str]:
        """Start the servers, and wait until all of the leased machines answer, or enough of them when the time is over.

        Raises `JobFailed` if fewer answer.
        """
        end = time.monotonic() + self.config.start_minutes * 60
        while not self._all_ready():
            self.session.run.touch()
            yield from self._advance(every_line=True)
            if time.monotonic() > end or self._hopeless():
                if self.ready < self.config.min_replicas:
                    raise self._too_few()
                yield f"{self.ready} of {self.config.replicas} servers answer, which is enough to begin with"
                return
            time.sleep(LOOK_SECONDS / 4)

    def look(self) -> Iterator[LogLine | Serving]:
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        yield from map(LogLine, self._advance(every_line=False))
        if (replicas := self.links.known.get("replicas")) and replicas != self._shown:
            self._shown = replicas
            yield Serving(replicas)
        self._looked = time.monotonic()

    def end(self, went_well: bool) -> None:
        """End it. If all went well, servers are kept for another run, where the config asks for that."""
        for member in self.members:
            if member.reader is not None and not (went_well and self._kept(member)):
                self.session.end(self._job(member, ""), member.machine)
        self.session.end(self._links_job(), self.session.machine)

    def _kept(self, member: _Member) -> bool:
        minutes, job = self._keep_minutes, self._job(member, "")
        if not minutes or not member.machine.keep_servers(job.name, label_of(self.config), member.key, minutes):
            return False
        self.session.forget(job, member.machine)
        return True

    @property
    def _keep_minutes(self) -> float:
        assert self.config.machines is not None, "a pool is on other machines"
        return self.config.machines.keep_minutes

    @property
    def ready(self) -> int:
        return int(self.links.known.get("ready", 0))

    @property
    def key(self) -> str:
        """The public key of the trainer's machine; empty until it is there."""
        return str(self.links.known.get("key", ""))

    def _all_ready(self) -> bool:
        if any(member.beginning for member in self.members):
            return False
        started = [member for member in self.members if member.reader is not None]
        return bool(started) and self.ready == sum(member.replicas for member in started) > 0

    def _hopeless(self) -> bool:
        """Whether the servers of all machines that were leased have failed to come up."""
        tried = [member for member in self.members if member.reader or member.last]
        return bool(tried) and not any(member.reader for member in tried)

    def _too_few(self) -> JobFailed:
        said = [f"{member.machine.name}: {member.said}" for member in self.members if member.said]
        last = next((member.last for member in self.members if member.last), [])
        message = f"serve: {self.ready} servers answer, and {self.config.min_replicas} are needed (engine.min_replicas)"
        return JobFailed("; ".join([message, *said]), tuple(last), mendable=False)

    def _advance(self, every_line: bool) -> Iterator[str]:
        """Bring everything one step further."""
        yield from self.links.read()
        if self.links.status.state in ENDED:
            yield from start_leased(self._links_job(), self.session.machine, [self.links.job])
            self.links.started_again()
        for member in self.members:
            if time.monotonic() >= member.again:
                yield from self._advance_member(member, every_line)
        self._tell_machines()
        said = f"{self.ready} of {sum(member.replicas for member in self.members)} servers answer"
        if self.ready and said != self._ready:
            self._ready = said
            yield said

    def _advance_member(self, member: _Member, every_line: bool) -> Iterator[str]:
        name = member.machine.name
        try:
            if member.reader is None:
                yield from self._go_on_beginning(member)
                return
            for line in member.reader.read():
                if every_line:
                    yield f"{name}: {line}"
            status = member.reader.status
            if status.state == "unreachable":
                raise Unreachable(status.message)
            if status.state == "running":
                self._hand(member, member.reader.job)
            if status.state in ENDED:
                yield from self._lost(member, member.reader)
        except RolloutsError as error:  # the others go on
            if member.reader is None:
                member.replicas = 0
            member.failed()
            if str(error) != member.said:
                member.said = str(error)
                yield f"{member.said}; it is tried again"

    def _hand(self, member: _Member, job: str) -> None:
        """Tell its servers' job whose key is let in, and to which machines it passes weights on."""
        keys = [self.key, *(key for parent in self._parents(member) if (key := _key_in(parent)))]
        handed = "\n".join(keys) if self.key else ""
        if handed != member.handed:
            member.machine.hand(job, HANDED, handed)
            member.handed, member.said, member.failures = handed, "", 0
        below = [self._described[name] for name in onward(list(self._described)).get(member.machine.name, [])]
        if below != member.below:
            member.machine.hand(job, ONWARD, json.dumps(below))
            member.below = below

    def _parents(self, member: _Member) -> list[_Member]:
        """The machines that pass weights on to it."""
        above = [name for name, below in onward(list(self._described)).items() if member.machine.name in below]
        return [other for other in self.members if other.machine.name in above]

    def _go_on_beginning(self, member: _Member) -> Iterator[str]:
        """Bring a machine further without waiting: to build an environment there takes minutes."""
        steps = member.beginning or self._begin(member)
        member.beginning = None
        for line in steps:
            if line == QUIET:
                member.beginning = steps
                return
            yield line

    def _lost(self, member: _Member, reader: JobReader) -> Iterator[str]:
        """Handle a machine whose servers have ended: it was drained, or they are to be started again."""
        drained = reader.status.exit_status == 0
        said = "drained" if drained else reader.status.message or "its servers were killed"
        if said != member.said:
            member.said = said
            yield f"{member.machine.name}: {said}"
        if drained:
            member.machine.unclaim()
        self.session.forget(self._job(member, ""), member.machine)
        member.reader, member.replicas, member.handed, member.last = None, 0, "", reader.last
        member.below = []
        member.failed()

    def _begin(self, member: _Member) -> Iterator[str]:
        """Lease it, and start its servers."""
        machine = member.machine
        job = pool_name(self.chain, self._trains(machine), machine.node)
        there = sum(other.replicas for other in self.members)
        if there >= self.config.replicas:
            member.failed()
            return
        if not machine.is_leased and (reason := machine.try_claim([job], label_of(self.config))):
            member.failed()
            if reason != member.said:
                member.said = reason
                yield reason
            return
        refuse_unfit(machine.name, machine.remote.call("facts"))
        gpus = leased_gpus(self._on(machine))
        member.replicas = replicas_on(self.config, gpus, there, len(self.members))
        if not member.replicas:
            machine.unclaim()
            raise BadInput(f"{machine.name}: its {len(machine.gpus)} GPUs are too few for a server")
        python = yield from self._python(machine, gpus > 0)
        path = yield from self._send_model(machine)
        placed = self._job(member, path, python)
        member.key = _key_of(placed, machine)
        self.session.expect("serve", placed, machine)
        try:
            taken_over = _taken_over(placed, member.key, machine)
            if not taken_over:
                if self._keep_minutes:
                    machine.place_servers(placed.name)
                machine.start(placed)
        except LeaseLapsed:
            machine.unclaim()
            raise
        member.reader, member.host_key = JobReader(machine, placed.name), machine.host_key()
        if taken_over:
            member.reader.read()  # as an earlier run reported it
        said = "of an earlier run are taken over" if taken_over else "are started"
        yield f"{machine.name}: {member.replicas} {self.config.kind} server(s) {said}"

    def _send_model(self, machine: SSHMachine) -> Generator[str, None, str]:
        """Returns where it is there: the policy without weights, a model beside it whole."""
        if not isinstance(self.segment.spec, ServeSpec):
            return send_frame(self.segment, self.session, machine)
        yield from machine.supply([self.segment])
        return machine.placed(self.segment).external["model"].location

    def _python(self, machine: SSHMachine, on_gpu: bool) -> Any:
        """Yields the installer's lines; returns the interpreter."""
        if self.config.kind == "embedded":
            for said in prepare_environment(machine, self.session):
                if isinstance(said, str):
                    yield said
            return machine.python
        if self.config.python is not None:
            return self.config.python
        for built in engine_python(packages_of(self.config.kind, on_gpu), self._on(machine)):
            if isinstance(built, Path):
                return str(built)
            yield f"{machine.name}: {built}" if built else QUIET
        raise AssertionError("building ends with the interpreter, or raises")

    def _job(self, member: _Member, path: str, python: str = "") -> Job:
        machine = member.machine
        placed = replace(self.config, replicas=max(1, member.replicas), min_replicas=1)
        placement = placement_of(leased_gpus(self._on(machine)), 0, placed)
        place = key_of({"home": machine.remote.work, "job": self.chain, "node": machine.node})[:16]
        model = model_of(self.segment.spec, path, has_weights=False)
        keeper = machine.remote.command("servers", "{directory}")
        command = [python, *keeper[1:]] if python and self.config.python is None else keeper  # NumPy is there
        job = serve_job(
            self.chain, command, self.config, model, python, placement,
            f"/dev/shm/rollouts-weights.{place}", f"{machine.remote.work}/drained",
        )  # fmt: skip
        receives = not model.name and self.config.weight_sync == "broadcast"
        network = self._trainer_address(machine) if receives else None
        return replace(
            job, name=pool_name(self.chain, self._trains(machine), machine.node), spec={**job.spec, "network": network}
        )

    def _trains(self, machine: SSHMachine) -> bool:
        return machine.name in {trains.name for trains in (self.session.machine, *self.session.peers)}

    def _trainer_address(self, machine: SSHMachine) -> str:
        """The trainer's address on its network with a machine of servers."""
        trainer = self.session.machine
        if isinstance(trainer, SSHMachine):
            return trainer.address
        return own_address(machine.remote.host.for_machines)

    def _on(self, machine: SSHMachine) -> MachineSession:
        """The session as if that machine were the run's."""
        return replace(self.session, machine=machine)

    def _links_job(self) -> Job:
        return links_job(self.chain, self.session)

    def _tell_machines(self) -> None:
        """The trainer's side of each machine whose servers have a port."""
        found = [_describe(member, self.key) for member in self.members]
        self._described = {described["name"]: described for described in found if described}
        told = json.dumps(list(self._described.values()))
        if told != self._told:
            self.session.machine.hand(self.links.job, "machines.json", told)
            self._told = told


def start_pool(
    config: EngineConfig, segment: Stage, chain: str, session: MachineSession, owner: str = ""
) -> Iterator[str]:
    """Start servers for a segment's policy, or for the model beside it that `owner` names; yields lines until they
    answer.

    Raises `JobFailed` with a server's last lines when too few come up.
    """
    assert config.machines is not None, "a pool is on other machines"
    said = f"serve-{owner}" if owner else "serve"
    job = links_job(chain, session)
    session.expect(said, job, session.machine)
    yield from start_leased(job, session.machine, [job.name])
    links = JobReader(session.machine, job.name)
    members = [_Member(machine) for machine in session.engines[owner, config.machines]]
    pool = EnginePool(config, segment, chain, session, members, links)
    session.pools[chain] = pool
    session.run.job(said, session.machine.name, job.name, session.machine.attempt(job.name).log)
    yield from pool.start()


def end_pool(chain: str, session: MachineSession, went_well: bool) -> bool:
    """End all of it, or keep its servers for another run; whether there was any."""
    pool = session.pools.pop(chain, None)
    if not isinstance(pool, EnginePool):
        return False
    pool.end(went_well)
    return True


def links_job(chain: str, session: MachineSession) -> Job:
    """The job on the trainer's machine that keeps its connections to the servers."""
    command = tuple(host_command(session, "pool"))
    return Job(
        service_name(chain), command, {"memory": "/dev/shm"}, SERVICE_SECONDS, UNATTENDED_SECONDS, SERVICE_SECONDS
    )


def _key_of(job: Job, machine: SSHMachine) -> str:
    spec = {name: value for name, value in job.spec.items() if name != "memory"}
    return key_of({"spec": spec, "command": job.command, "code": machine.code})


def _taken_over(job: Job, key: str, machine: SSHMachine) -> bool:
    """Whether servers that an earlier run has left are the job's now. Others that are left on the lease are ended."""
    kept, machine.kept = machine.kept, None
    if kept is None:
        return False
    if kept["key"] == key and machine.take_over(kept["job"], job.name):
        return True
    machine.cancel(kept["job"])
    return False


def _key_in(member: _Member) -> str:
    """The public key of its servers' job; empty while it has none."""
    return str(member.reader.known.get("key", "")) if member.reader is not None else ""


def _describe(member: _Member, key: str) -> dict[str, Any] | None:
    """A machine as `infra.host.links.Machine` has it; None where it does not let the key in yet."""
    if member.reader is None or not key or key not in member.reader.known.get("admitted", "").splitlines():
        return None
    remote = member.machine.remote
    return {
        "name": member.machine.name,
        "host": member.machine.address,
        "port": 22 if member.machine.node else remote.host.port,
        "user": remote.user,
        "host_key": member.host_key,
        "gate": member.reader.known["gate"],
    }
