"""The machines of a run's servers, found or rented before they are leased."""

from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from infra.connection.remote import Remote
from infra.inventory import Host
from infra.jobs.session import MachineSession
from infra.jobs.stage_job import job_name
from infra.machines.requirements import engine_hosts
from infra.machines.ssh_machine import SSHMachine
from infra.provisioning.claim import Pool, who
from infra.provisioning.rented import PROVIDERS, RENTED, release, rent
from infra.servers.beside import chain_beside
from rollouts_core.config import EngineConfig, EngineMachines, MachineConfig
from rollouts_core.stages.plan import Plan
from rollouts_core.stages.specs import served_in, servers_of
from rollouts_core.store.keys import key_of


@dataclass(frozen=True)
class _Wanted:
    """Servers on other machines that a run needs."""

    owner: str
    """The model beside the policy; empty for the policy."""
    config: EngineConfig
    chains: tuple[str, ...]
    """The jobs of trainers that these servers work for."""


def with_engines(
    session: MachineSession, plan: Plan, *taken: str | None
) -> Generator[str, None, tuple[MachineSession, list[Pool]]]:
    """Lease machines for servers: for the policy of the first stage that is still to be made, and for each model beside
    it, those that are leased with the trainer included. They are given back at the end of the run. Yields what is
    waited for.

    Raises `BadInput` where no machine of the inventory fits, `MachineError` where none can be rented.
    """
    known: dict[tuple[str, str], SSHMachine] = {}
    engines: dict[tuple[str, EngineMachines], tuple[SSHMachine, ...]] = {}
    pools: dict[str, Pool] = {}
    for wanted in _wanted(session, plan):
        owner, asked = wanted.owner, wanted.config.machines
        assert asked is not None, "servers here are not among them"
        if (owner, asked) not in engines:
            engines[owner, asked] = yield from _engine_machines(wanted, plan, session, known, taken)
        pools.setdefault(owner, Pool(engines[owner, asked], wanted.config, wanted.chains, taken))
    return replace(session, engines=engines), list(pools.values())


def _wanted(session: MachineSession, plan: Plan) -> list[_Wanted]:
    todo = [stage for stage in (*plan.rl, *plan.after_training) if not session.has(stage.artifact)]
    chains = tuple(map(job_name, plan.chains))
    found = [_Wanted("", config, chains) for stage in todo if (config := servers_of(stage.spec)) and config.machines]
    for stage in plan.served:
        served = served_in(stage.spec)
        if served.engine.machines and any(stage.name in link.external for link in todo):
            found.append(_Wanted(served.name, served.engine, (chain_beside(stage, plan),)))
    return found


def _engine_machines(
    wanted: _Wanted,
    plan: Plan,
    session: MachineSession,
    known: dict[tuple[str, str], SSHMachine],
    taken: Collection[str | None],
) -> Generator[str, None, tuple[SSHMachine, ...]]:
    """A model beside the policy has leases of its own, also on a machine where the policy has some."""
    asked, owner = wanted.config.machines, wanted.owner
    assert asked is not None, "servers here are not among them"
    if asked.nodes:
        assert isinstance(session.machine, SSHMachine), "the config's checks say so"
        return tuple(session.machine.further_nodes(asked.nodes, asked.gpus, asked.options))
    if asked.rented:
        kind = key_of({"accelerator": asked.accelerator, "gpus": asked.gpus, "owner": owner})[:4]
        names = [f"{RENTED}{plan.stages[-1].key[:12]}-{kind}-{number}" for number in range(1, asked.rented + 1)]
        new = [name for name in names if (owner, name) not in known]
        yield from (f"renting {name} ({asked.accelerator or 'no GPU'})" for name in new)
        hosts: Mapping[str, Host] = rent(new, asked, session.run)
    else:
        hosts = engine_hosts(asked, taken)
        names = list(hosts)
    for name, host in hosts.items():
        if (owner, name) not in known:
            known[owner, name] = _engine_machine(name, host, wanted, session)
    return tuple(known[owner, name] for name in names)


def _engine_machine(name: str, host: Host, wanted: _Wanted, session: MachineSession) -> SSHMachine:
    asked = wanted.config.machines
    assert asked is not None, "servers here are not among them"
    gpus = host.gpus if asked.gpus is None else asked.gpus
    settings = MachineConfig(kind="ssh", name=name, gpus=gpus, environment=session.settings.environment)
    machine = SSHMachine(Remote(name, host, 0.0), session.store, settings, who(session.run))
    provider = PROVIDERS["sky"] if asked.rented else None
    whose = f" for {wanted.owner}" if wanted.owner else " for servers"
    session.run.endings.note(f"what is leased on {name}{whose}", partial(release, machine, provider))
    session.run.endings.forget(f"the rented {name}")
    return machine
