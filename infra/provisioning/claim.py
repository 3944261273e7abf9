"""Machines that are leased together: all or none."""

from collections.abc import Iterator, Sequence
from functools import partial

from infra.errors import MachineError
from infra.jobs.ranks import ranks_of
from infra.machines.ssh_machine import SSHMachine
from infra.machines.waiting import until_free
from infra.servers.capacity import replicas_on
from infra.servers.job import service_name
from rollouts_core.config import EngineConfig
from rollouts_core.errors import BadInput


def claim_all(
    machines: Sequence[SSHMachine],
    jobs: Sequence[str],
    hours: float,
    engines: Sequence[SSHMachine] = (),
    config: EngineConfig | None = None,
) -> Iterator[str]:
    """Lease all machines, or none: what was had is given back while one is waited for, so no two groups can block each
    other. Where one of the jobs, or its ranks, run, that lease is joined. Of `engines` as many are leased as have room
    for the config's replicas, and at least for `min_replicas`. Yields why it waits.

    Raises `MachineError` after `hours`.
    """
    yield from until_free(partial(_try_all, machines, [*jobs, *map(ranks_of, jobs)], engines, config), hours)


def _try_all(
    machines: Sequence[SSHMachine], jobs: Sequence[str], engines: Sequence[SSHMachine], config: EngineConfig | None
) -> str:
    had: list[SSHMachine] = []
    reason = ""
    for machine in machines:
        if reason := machine.try_claim(jobs):
            break
        had.append(machine)
    if not reason and config is not None:
        reason = _try_engines(engines, [service_name(job) for job in jobs], config, had)
    if reason:
        for machine in had:
            machine.unclaim()
    return reason


def _try_engines(
    engines: Sequence[SSHMachine], jobs: Sequence[str], config: EngineConfig, had: list[SSHMachine]
) -> str:
    """A machine that is away or unfit is one that is not had."""
    replicas, problems = 0, []
    for machine in engines:
        if replicas >= config.replicas:
            break
        try:
            reason = machine.try_claim(jobs)
        except (MachineError, BadInput) as error:
            reason = str(error)
        if reason:
            problems.append(reason)
            continue
        had.append(machine)
        replicas += replicas_on(config, len(machine.gpus), replicas, len(engines))
    if replicas >= config.min_replicas:
        return ""
    said = "; ".join(problems) or "they have too few GPUs"
    return f"room for {replicas} servers of the {config.min_replicas} that are needed (engine.min_replicas): {said}"
