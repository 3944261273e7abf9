"""Machines that are leased together: all or none."""

from collections.abc import Iterator, Sequence
from functools import partial

from infra.jobs.ranks import ranks_of
from infra.machines.ssh_machine import SSHMachine
from infra.machines.waiting import until_free


def claim_all(machines: Sequence[SSHMachine], jobs: Sequence[str], hours: float) -> Iterator[str]:
    """Lease all machines, or none: what was had is given back while one is waited for, so no two groups can block each
    other. Where one of the jobs, or its ranks, run, that lease is joined. Yields why it waits. Raises `MachineError`
    after `hours`.
    """
    yield from until_free(partial(_try_all, machines, [*jobs, *map(ranks_of, jobs)]), hours)


def _try_all(machines: Sequence[SSHMachine], jobs: Sequence[str]) -> str:
    for number, machine in enumerate(machines):
        if reason := machine.try_claim(jobs):
            for had in machines[:number]:
                had.unclaim()
            return reason
    return ""
