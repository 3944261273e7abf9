"""Machines that are leased together: all or none."""

import getpass
import socket
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from infra.errors import MachineError
from infra.jobs.ranks import ranks_of
from infra.machines.ssh_machine import SSHMachine
from infra.machines.waiting import until_free
from infra.servers.capacity import replicas_on
from infra.servers.job import label_of, pool_name
from rollouts_core.config import EngineConfig
from rollouts_core.errors import BadInput
from rollouts_core.observe.runs import RunLog


@dataclass(frozen=True)
class Pool:
    """Machines for the servers of one model."""

    machines: Sequence[SSHMachine]
    config: EngineConfig
    chains: Sequence[str]
    """The trainer's jobs that they are for; where servers of one run on a machine, their lease is joined."""
    trains: Collection[str | None] = ()
    """Machines that train as well."""

    def jobs(self, machine: SSHMachine) -> list[str]:
        return [pool_name(chain, machine.name in self.trains, machine.node) for chain in self.chains]


def claim_all(
    machines: Sequence[SSHMachine],
    jobs: Sequence[str],
    hours: float,
    pools: Sequence[Pool] = (),
) -> Iterator[str]:
    """Lease all machines, or none: what was had is given back while one is waited for, so no two groups can block each
    other. Where one of the jobs, or its ranks, run, that lease is joined. Of a pool's machines as many are leased as
    have room for its replicas, and at least for `min_replicas`. Yields why it waits.

    Raises `MachineError` after `hours`.
    """
    ranks = [ranks_of(job, node) for job in jobs for node in range(1, len(machines))]
    yield from until_free(partial(_try_all, machines, [*jobs, *ranks], pools), hours)


def who(run: RunLog) -> str:
    """Uses a machine: for others who wait for it."""
    return f"{run.run_id} of {getpass.getuser()}@{socket.gethostname()}"


def _try_all(machines: Sequence[SSHMachine], jobs: Sequence[str], pools: Sequence[Pool]) -> str:
    had: list[SSHMachine] = []
    reason = ""
    for machine in machines:
        if reason := machine.try_claim(jobs):
            break
        had.append(machine)
    for pool in pools:
        if not reason:
            reason = _try_engines(pool, had)
    if reason:
        for machine in had:
            machine.unclaim()
    return reason


def _try_engines(pool: Pool, had: list[SSHMachine]) -> str:
    """A machine that is away or unfit is one that is not had."""
    replicas, problems, config = 0, [], pool.config
    for machine in pool.machines:
        if replicas >= config.replicas:
            break
        try:
            reason = machine.try_claim(pool.jobs(machine), label_of(config))
        except (MachineError, BadInput) as error:
            reason = str(error)
        if reason:
            problems.append(reason)
            continue
        had.append(machine)
        replicas += replicas_on(config, len(machine.gpus), replicas, len(pool.machines))
    if replicas >= config.min_replicas:
        return ""
    said = "; ".join(problems) or "they have too few GPUs"
    return f"room for {replicas} servers of the {config.min_replicas} that are needed (min_replicas): {said}"
