"""A machine for a run: this one, one of the inventory, or a rented one.

Decision: a machine that is asked for by name is waited for; among several that fit, the one that has most of the run's
artifacts, or its job, comes first, then the first with free GPUs, in the inventory's order.

Decision: GPUs are claimed only when something is to be made. A run whose stages are all there needs the machine, at
most, to bring results home.
"""

import getpass
import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from infra.check import refuse_unfit
from infra.errors import MachineError, Unreachable
from infra.group import claim_all
from infra.inventory import Host, find_host, load_inventory
from infra.jobs import MachineSession, end_job, end_ranks, job_name
from infra.local import LocalMachine
from infra.machine import Machine
from infra.needs import fitting_hosts, passed_variables, wanted_gpus
from infra.provider import Provider
from infra.remote import Remote
from infra.sky import SkyPilot
from infra.ssh_machine import SSHMachine
from rollouts_core.config import MachineConfig
from rollouts_core.errors import BadInput
from rollouts_core.observe.runs import RunLog
from rollouts_core.stages.plan import Plan
from rollouts_core.store.store import Store

logger = logging.getLogger("rollouts.machines")

RENTED = "rollouts-"
"""How the names of rented machines begin."""
REACH_SECONDS = 60.0


def this_machine(settings: MachineConfig, store: Store, run: RunLog) -> MachineSession:
    """For stages that run here in any case."""
    return MachineSession(LocalMachine(store), store, settings, run)


def provision_machine(settings: MachineConfig, plan: Plan, store: Store, run: RunLog) -> Iterator[str | MachineSession]:
    """Yields what is waited for, then the session.

    Raises `BadInput` when store or machine cannot be used as they are, `MachineError` when none is free in time.
    """
    store.check_usable()
    if settings.kind == "local":
        yield this_machine(settings, store, run)
        return
    passed_variables(settings)
    who = f"{run.run_id} of {getpass.getuser()}@{socket.gethostname()}"
    provider: Provider | None = SkyPilot() if settings.kind == "sky" else None
    name = f"{RENTED}{plan.stages[-1].key[:12]}"
    machine: SSHMachine | None = None
    peers: tuple[SSHMachine, ...] = ()
    try:
        if provider is not None:
            yield f"renting {name} ({settings.accelerator or 'no GPU'})"
            candidates: Mapping[str, Host] = {name: provider.launch(name, settings)}
        else:
            candidates = fitting_hosts(settings)
        peers = tuple(_reach_peers(settings, store, who))
        for said in _claimed(candidates, settings, plan, store, who, peers):
            if isinstance(said, SSHMachine):
                machine = said
            else:
                yield said
        assert machine is not None, "a claim that fails raises"
        discard_refreshed(machine, plan, run)
    except BaseException:
        for had in (*peers, *([machine] if machine else [])):
            had.release()
        _give_back(provider, name)
        raise
    yield MachineSession(machine, store, settings, run, provider=provider, peers=peers)


def release_machine(session: MachineSession) -> None:
    """End what the run's jobs left running, and give back what was leased or rented."""
    try:
        for job in [*session.cursors, *(service.name for service in session.services.values())]:
            end_job(job, session.machine)
            end_ranks(job, session.peers)
    finally:
        for peer in session.peers:
            peer.release()
        in_use = session.machine.release()
        if not in_use:
            _give_back(session.provider, session.machine.name)


def _give_back(provider: Provider | None, name: str) -> None:
    try:
        if provider is not None:
            provider.down(name)
    except (MachineError, BadInput) as error:
        logger.warning("%s was not given back, it goes down by itself when nothing runs there: %s", name, error)


@contextmanager
def reach_machine(name: str, store: Store) -> Iterator[Machine]:
    """A machine that a run used, for whoever asks for its jobs later. Raises `BadInput` when it is not known here."""
    if name == LocalMachine.name:
        yield LocalMachine(store)
        return
    host = load_inventory().get(name) or (SkyPilot().find(name) if name.startswith(RENTED) else find_host(name))
    remote = Remote(name, host, REACH_SECONDS)
    machine = SSHMachine(remote.open(), store, MachineConfig(kind="ssh", name=name), "somebody")
    try:
        yield machine
    finally:
        machine.release()


def discard_refreshed(machine: Machine, plan: Plan, run: RunLog) -> None:
    """What the run was asked to make again is not to be found on its machine either. Once, however often it retries."""
    if run.record.refreshed and machine.name not in run.record.discarded_on:
        machine.discard([stage.artifact for stage in plan.stages if stage.name in run.record.refreshed])
        run.discarded(machine.name)


@dataclass(frozen=True)
class _Candidate:
    remote: Remote
    missing: int
    """Stages that are neither here nor there."""
    has_job: bool


def _claimed(
    hosts: Mapping[str, Host],
    settings: MachineConfig,
    plan: Plan,
    store: Store,
    who: str,
    peers: Sequence[SSHMachine],
) -> Iterator[str | SSHMachine]:
    """Reach the hosts and claim one, with its peers; yields what is waited for, then the machine."""
    jobs = [job_name(chain) for chain in plan.chains]
    reached: list[_Candidate] = []
    problems: list[Exception] = []
    for name, host in hosts.items():
        remote = Remote(name, host, settings.unreachable_limit_hours * 3600)
        try:
            refuse_unfit(name, remote.open().call("facts"))
        except (BadInput, MachineError) as error:
            remote.close()
            problems.append(error)
            if len(hosts) > 1:
                yield str(error)
            continue
        there = set(remote.call("artifacts", names=[stage.artifact.directory for stage in plan.stages]))
        heavy = [stage.artifact for chain in plan.chains for stage in chain]
        lacking = [artifact for artifact in heavy if artifact.directory not in there and not store.has(artifact)]
        running = remote.call("busy")["jobs"]
        reached.append(_Candidate(remote, len(lacking), bool(set(running) & set(jobs))))
    if not reached:
        raise problems[0] if len(problems) == 1 else _all_failed(problems)
    reached.sort(key=lambda candidate: (not candidate.has_job, candidate.missing))
    chosen = next((candidate for candidate in reached if _is_free(candidate, settings)), reached[0])
    for candidate in reached:
        if candidate is not chosen:
            candidate.remote.close()
    machine = SSHMachine(chosen.remote, store, settings, who)
    try:
        if chosen.missing and peers:
            yield from claim_all([machine, *peers], jobs, settings.wait_hours * 3600)
        elif chosen.missing:
            yield from machine.claim(jobs)
    except BaseException:
        machine.release()
        raise
    yield machine


def _reach_peers(settings: MachineConfig, store: Store, who: str) -> list[SSHMachine]:
    """All of them, or none. Raises `BadInput` or `MachineError` as reaching a machine does."""
    reached: list[SSHMachine] = []
    try:
        for name in settings.peers:
            (host,) = fitting_hosts(replace(settings, name=name, peers=())).values()
            remote = Remote(name, host, settings.unreachable_limit_hours * 3600).open()
            reached.append(SSHMachine(remote, store, settings, who))
            refuse_unfit(name, remote.call("facts"))
    except BaseException:
        for peer in reached:
            peer.release()
        raise
    return reached


def _is_free(candidate: _Candidate, settings: MachineConfig) -> bool:
    if candidate.has_job or not candidate.missing:
        return True
    taken = sum(len(lease["gpus"]) for lease in candidate.remote.call("busy")["leases"])
    there = candidate.remote.host.gpus
    return there - taken >= wanted_gpus(settings, there)


def _all_failed(problems: Sequence[Exception]) -> Exception:
    if all(isinstance(problem, Unreachable) for problem in problems):
        return Unreachable("no machine answers: " + "; ".join(map(str, problems)))
    return BadInput([str(problem) for problem in problems], "no machine can be used")
