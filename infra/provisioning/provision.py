"""A machine for a run: this one, one of the inventory, or a rented one.

Decision: a machine that is asked for by name is waited for; among several that fit, the one that has most of the run's
artifacts, or its job, comes first, then the first with free GPUs, in the inventory's order.

Decision: GPUs are claimed only when something is to be made. A run whose stages are all there needs the machine, at
most, to bring results home.
"""

import logging
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from infra.connection.remote import Remote
from infra.errors import MachineError
from infra.inventory import Host, find_host, load_inventory
from infra.jobs.placing import refuse_unplaceable
from infra.jobs.session import MachineSession
from infra.jobs.stage_job import job_name
from infra.machines.check import refuse_unfit
from infra.machines.local import LocalMachine
from infra.machines.machine import Machine
from infra.machines.requirements import fitting_hosts, passed_variables, wanted_gpus
from infra.machines.ssh_machine import SSHMachine
from infra.provisioning.claim import claim_all, who
from infra.provisioning.pools import with_engines
from infra.provisioning.provider import Provider
from infra.provisioning.rented import PROVIDERS, RENTED, all_failed, find_rented, give_back, release
from infra.servers.beside import served_by
from rollouts_core.config import MachineConfig
from rollouts_core.errors import BadInput
from rollouts_core.observe.runs import RunLog
from rollouts_core.stages.plan import Plan
from rollouts_core.store.store import Store

logger = logging.getLogger("rollouts.machines")

REACH_SECONDS = 60.0


def this_machine(settings: MachineConfig, store: Store, run: RunLog) -> MachineSession:
    """The session of this machine, for stages that always run here."""
    return MachineSession(LocalMachine(store, settings, who(run)), store, settings, run)


def provision_machine(settings: MachineConfig, plan: Plan, store: Store, run: RunLog) -> Iterator[str | MachineSession]:
    """Yields what is waited for, then the session.

    What is reached, leased and rented is noted in the run's endings, and ends with them whatever happens.
    Raises `BadInput` when store or machine cannot be used as they are, `MachineError` when none is free in time.
    """
    store.check_usable()
    if settings.kind == "local":
        session = replace(this_machine(settings, store, run), served=served_by(plan))
        if todo := [stage for chain in plan.chains for stage in chain if not store.has(stage.artifact)]:
            run.endings.note("what is leased here", session.machine.release)
            jobs = [job_name(chain) for chain in plan.chains]
            yield from session.machine.claim(jobs)
            refuse_unplaceable(todo, session)
            session, pools = yield from with_engines(session, plan, settings.name)
            yield from claim_all([], jobs, settings.wait_hours, pools)
        yield session
        return
    passed_variables(settings)
    provider = PROVIDERS.get(settings.kind)
    if provider is not None:
        name = f"{RENTED}{plan.stages[-1].key[:12]}"
        yield f"renting {name} ({settings.accelerator or 'no GPU'})"
        run.endings.note(f"the rented {name}", partial(give_back, provider, name))
        candidates: Mapping[str, Host] = {name: provider.launch(name, settings)}
    else:
        candidates = fitting_hosts(settings)
    reach = _Reach(settings, store, run)
    peers = [reach.machine(reach.remote(name, find_host(name))) for name in settings.peers]
    chosen = yield from _chosen(candidates, reach, plan)
    machine = reach.machine(chosen.remote, provider)
    peers += machine.further_nodes(settings.nodes - 1)
    jobs = [job_name(chain) for chain in plan.chains]
    session = MachineSession(machine, store, settings, run, peers=tuple(peers), served=served_by(plan))
    if chosen.missing:
        session, pools = yield from with_engines(session, plan, machine.name, *settings.peers)
        if peers or pools:
            yield from claim_all([machine, *peers], jobs, settings.wait_hours, pools)
        else:
            yield from machine.claim(jobs)
        refuse_unplaceable((stage for chain in plan.chains for stage in chain), session)
    for used in (machine, *peers):
        used.note_run(run.run_id, run.record.name, [stage.artifact for stage in plan.stages])
    discard_refreshed(machine, plan, run)
    yield session


@contextmanager
def reach_machine(name: str, store: Store) -> Iterator[Machine]:
    """A machine that a run used, for whoever asks for its jobs later. Raises `BadInput` when it is not known here."""
    if name == LocalMachine.name:
        yield LocalMachine(store)
        return
    name = name.partition("+")[0]  # NAME+K is node K of an allocation
    host = load_inventory().get(name) or (find_rented(name) if name.startswith(RENTED) else find_host(name))
    with closing(Remote(name, host, REACH_SECONDS)) as remote:
        yield SSHMachine(remote.open(), store, MachineConfig(kind="ssh", name=name), "somebody")


def discard_refreshed(machine: Machine, plan: Plan, run: RunLog) -> None:
    """Remove the artifacts of refreshed stages from the machine, so that they are made again; once, despite retries."""
    if run.record.refreshed and machine.name not in run.record.discarded_on:
        machine.discard([stage.artifact for stage in plan.stages if stage.name in run.record.refreshed])
        run.discarded(machine.name)


@dataclass(frozen=True)
class _Reach:
    """Reaches hosts for a run: connections and leases end with it."""

    settings: MachineConfig
    store: Store
    run: RunLog

    def remote(self, name: str, host: Host) -> Remote:
        """Raises `BadInput` for what a person must mend, also of an unfit host; `Unreachable` without an answer."""
        remote = Remote(name, host, self.settings.unreachable_limit_hours * 3600)
        self.run.endings.note(_connection(name), remote.close)
        try:
            refuse_unfit(name, remote.open().call("facts"))
        except (BadInput, MachineError):
            self.leave(remote)
            raise
        return remote

    def machine(self, remote: Remote, provider: Provider | None = None) -> SSHMachine:
        """The host as a machine, given back with all that is leased there, and to its provider unless others use it."""
        machine = SSHMachine(remote, self.store, self.settings, who(self.run))
        self.run.endings.note(f"what is leased on {machine.name}", partial(release, machine, provider))
        self.run.endings.forget(f"the rented {machine.name}")
        return machine

    def leave(self, remote: Remote) -> None:
        remote.close()
        self.run.endings.forget(_connection(remote.name))


def _connection(name: str) -> str:
    return f"the connection to {name}"


@dataclass(frozen=True)
class _Candidate:
    remote: Remote
    missing: int
    """Stages that are neither here nor there."""
    has_job: bool


def _chosen(hosts: Mapping[str, Host], reach: _Reach, plan: Plan) -> Generator[str, None, _Candidate]:
    """Reach the hosts and choose one; yields what is wrong with the others."""
    reached: list[_Candidate] = []
    problems: list[Exception] = []
    for name, host in hosts.items():
        try:
            reached.append(_candidate(reach.remote(name, host), reach.store, plan))
        except (BadInput, MachineError) as error:
            problems.append(error)
            if len(hosts) > 1:
                yield str(error)
    if not reached:
        raise problems[0] if len(problems) == 1 else all_failed(problems)
    reached.sort(key=lambda candidate: (not candidate.has_job, candidate.missing))
    chosen = next((candidate for candidate in reached if _is_free(candidate, reach.settings)), reached[0])
    for candidate in reached:
        if candidate is not chosen:
            reach.leave(candidate.remote)
    return chosen


def _candidate(remote: Remote, store: Store, plan: Plan) -> _Candidate:
    there = set(remote.call("artifacts", names=[stage.artifact.directory for stage in plan.stages]))
    heavy = [stage.artifact for chain in plan.chains for stage in chain]
    lacking = [artifact for artifact in heavy if artifact.directory not in there and not store.has(artifact)]
    jobs = {job_name(chain) for chain in plan.chains}
    return _Candidate(remote, len(lacking), bool(set(remote.call("busy")["jobs"]) & jobs))


def _is_free(candidate: _Candidate, settings: MachineConfig) -> bool:
    if candidate.has_job or not candidate.missing:
        return True
    taken = sum(len(lease["gpus"]) for lease in candidate.remote.call("busy")["leases"])
    there = candidate.remote.host.gpus
    return there - taken >= wanted_gpus(settings, there)
