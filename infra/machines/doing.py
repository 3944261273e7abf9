"""What the machines of an inventory do, and for whom. All are asked at the same time."""

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.connection.remote import Remote
from infra.errors import MachineError
from infra.inventory import Host
from rollouts_core.errors import BadInput


@dataclass(frozen=True)
class Doing:
    """The state of a machine, as it reports it."""

    problem: str = ""
    """Why the machine does not report; empty if it does."""
    drained_by: str = ""
    leases: tuple[Mapping[str, Any], ...] = ()
    """Leases, as `infra.host.gpu_leases.living` gives them."""
    servers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Servers by job: how many answer, and of how many."""

    def lines(self) -> list[str]:
        """The state as lines of text."""
        if self.problem:
            return [self.problem]
        said = [f"drained by {self.drained_by}: nothing is leased there any more"] if self.drained_by else []
        for lease in self.leases:
            gpus = f"GPU {','.join(map(str, lease['gpus']))}" if lease["gpus"] else "no GPU"
            if number := lease.get("slurm"):
                nodes = f"{lease['nodes']} nodes, " if lease["nodes"] > 1 else ""
                gpus = f"Slurm job {number} ({lease['state']}, {nodes}{gpus})"
            since = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(lease["since"]))
            running = _running(lease["running"], self.servers)
            if (kept := lease["kept"]) and not lease["holders"]:
                until = time.strftime("%H:%M UTC", time.gmtime(kept["until"]))
                said.append(f"{gpus}: kept until {until} for a run that wants the same{running}")
                continue
            said.append(f"{gpus}: {lease['who']} since {since}{running}")
        return said or ["free"]


def doing(hosts: Mapping[str, Host]) -> dict[str, Doing]:
    """The state of each machine, by name."""
    if not hosts:
        return {}
    with ThreadPoolExecutor(len(hosts)) as threads:
        return dict(zip(hosts, threads.map(_doing, hosts, hosts.values()), strict=True))


def _doing(name: str, host: Host) -> Doing:
    try:
        with closing(Remote(name, host, 0.0)) as remote:
            busy = remote.open().call("busy")
            drained = remote.call("drained")
    except (MachineError, BadInput) as error:
        return Doing(str(error).splitlines()[0])
    servers = {job: (told["ready"], told["of"]) for job, told in busy["servers"].items()}
    return Doing("", drained["who"] if drained else "", tuple(busy["leases"]), servers)


def _running(jobs: list[str], servers: Mapping[str, tuple[int, int]]) -> str:
    """Jobs by their names, servers by how many answer."""
    said = []
    for job in (Path(job).name for job in jobs):
        ready, of = servers.get(job, (0, 0))
        said.append(f"{ready} of {of} servers for {job.removeprefix('serve-')}" if of else job)
    return f", running {', '.join(said)}" if said else ""
