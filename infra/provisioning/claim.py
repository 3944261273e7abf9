"""Machines that are leased together: all or none."""

import time
from collections.abc import Iterator, Sequence

from infra.errors import MachineError
from infra.jobs.ranks import ranks_of
from infra.machines.ssh_machine import SSHMachine

QUEUE_SECONDS = 2.0


def claim_all(machines: Sequence[SSHMachine], jobs: Sequence[str], deadline: float) -> Iterator[str]:
    """Lease all machines, or none: what was had is given back while one is waited for, so no two groups can block each
    other. Where one of the jobs, or its ranks, run, that lease is joined. Yields why it waits. Raises `MachineError`
    after `deadline` seconds.
    """
    end, said = time.monotonic() + deadline, ""
    while reason := _try_all(machines, [*jobs, *map(ranks_of, jobs)]):
        if time.monotonic() > end:
            raise MachineError(f"{reason}; waited {deadline / 3600:g} hours (machine.wait_hours)")
        if reason != said:
            yield reason
            said = reason
        time.sleep(QUEUE_SECONDS)


def _try_all(machines: Sequence[SSHMachine], jobs: Sequence[str]) -> str:
    for number, machine in enumerate(machines):
        if reason := machine.try_claim(jobs):
            for had in machines[:number]:
                had.unclaim()
            return reason
    return ""
