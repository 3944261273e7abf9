"""Whether a machine is fit: what is looked at, what was found, what to do about it."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infra.connection.remote import Remote
from infra.errors import MachineError
from infra.host import gpu_leases
from infra.inventory import Host
from infra.machines.check_slurm import check_cluster
from infra.machines.finding import Finding
from rollouts_core.errors import BadInput

MIN_FREE_BYTES = 2**30
MAX_SKEW_SECONDS = 300.0
CHECK_PATIENCE = 5.0
LOGOUT_SECONDS = 2.0
"""Between the end of a connection and the look at what is left."""
STRANGERS_MIB = 1024
"""More than drivers and display servers take of a GPU."""
MIB_PER_GB = 1000**3 / 2**20


def check_machine(name: str, host: Host) -> Iterator[Finding]:
    """Everything a run needs of a machine, one finding after another; it ends early where nothing more can be seen."""
    remote = Remote(name, host, CHECK_PATIENCE)
    try:
        facts = remote.open().call("facts")
        clock = clock_finding(facts)  # yielded before the check of the logout, which takes seconds
        busy, use = remote.call("busy"), remote.call("gpu_use")
        cluster = list(check_cluster(remote, host.slurm)) if host.slurm else []
        logout = _logout_finding(remote)
    except BadInput as error:
        yield Finding("connection", "failed", f"{host.host}:{host.port}", str(error))
        return
    except MachineError as error:
        advice = "is it on, is the port right, is a firewall or a jump host between?"
        yield Finding("connection", "failed", str(error), advice)
        return
    finally:
        remote.close()
    yield Finding("connection", "ok", f"{host.host}:{host.port}, host key known")
    yield Finding(
        "python", "ok", f"{facts['python']} ({facts['interpreter']}), {'uv' if facts['uv'] else 'pip'} builds"
    )
    yield disk_finding(facts)
    if host.slurm is None:
        yield _gpu_finding(host, facts)
    if use:
        yield gpu_use_finding(use, busy["leases"])
    if cluster:
        yield from cluster
    yield clock
    yield logout
    running = ", ".join(busy["jobs"]) or "none"
    yield Finding("jobs", "ok", running)
    yield Finding("leases", "ok", gpu_leases.names(busy["leases"]) or "none")


def refuse_unfit(name: str, facts: Mapping[str, Any]) -> None:
    """Raises `BadInput` with everything that would make a run there fail later."""
    failed = [finding for finding in (disk_finding(facts), clock_finding(facts)) if finding.state == "failed"]
    if failed:
        raise BadInput([f"{finding.what}: {finding.found}: {finding.advice}" for finding in failed], name)


def disk_finding(facts: Mapping[str, Any]) -> Finding:
    free = f"{facts['disk_free'] / 2**30:.1f} GiB free at {facts['work']}"
    if facts["disk_free"] < MIN_FREE_BYTES:
        return Finding("disk", "failed", free, "free some, or name another directory with `work`")
    return Finding("disk", "ok", free)


def clock_finding(facts: Mapping[str, Any]) -> Finding:
    """The finding about the clock. This project compares no clocks, but certificates, object stores and logs do."""
    skew = facts["clock"] - time.time()
    found = f"{abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}"
    if abs(skew) > MAX_SKEW_SECONDS:
        return Finding("clock", "failed", found, "set it, as `timedatectl set-ntp true` does")
    return Finding("clock", "ok", found)


def _logout_finding(remote: Remote) -> Finding:
    """Whether a detached process outlives the connection that started it, as a job must."""
    left = remote.call("leave_behind")
    remote.close()
    time.sleep(LOGOUT_SECONDS)
    if remote.call("lives", pid=left["pid"], born_at=left["born"]):
        return Finding("logout", "ok", "detached processes go on")
    advice = (
        "jobs would end whenever this connection does: ask for KillUserProcesses=no in the host's logind.conf, or for "
        "whatever else ends your processes there to leave them alone"
    )
    return Finding("logout", "failed", "detached processes are ended when you log out", advice)


def gpu_use_finding(use: Sequence[Mapping[str, Any]], leases: Sequence[Mapping[str, Any]]) -> Finding:
    """How busy each GPU is; a warning where one is in use that no run has leased."""
    leased = {place for lease in leases for place in lease["gpus"]}
    found = "; ".join(_used(gpu) for gpu in use)
    strangers = [
        str(gpu["index"]) for gpu in use if gpu["index"] not in leased and (gpu["memory_used"] or 0.0) > STRANGERS_MIB
    ]
    if strangers:
        advice = f"GPU {', '.join(strangers)} is used by programs that hold no lease: a run there may lack memory"
        return Finding("gpu use", "warning", found, advice)
    return Finding("gpu use", "ok", found)


def _used(gpu: Mapping[str, Any]) -> str:
    told = {
        "utilization": "{:.0%} busy", "memory_used": "{:,.0f} MiB", "power": "{:.0f} W", "temperature": "{:.0f} °C",
    }  # fmt: skip
    known = [words.format(gpu[name]) for name, words in told.items() if gpu[name] is not None]
    return f"{gpu['index']}: {', '.join(known) or 'says nothing'}"


def _gpu_finding(host: Host, facts: Mapping[str, Any]) -> Finding:
    gpus = facts["gpus"]
    models = sorted({f"{gpu['model']}, {gpu['memory'] / MIB_PER_GB:.0f} GB, driver {gpu['driver']}" for gpu in gpus})
    found = f"{len(gpus)} ({'; '.join(models)})" if gpus else "none that nvidia-smi names"
    if len(gpus) < host.gpus:
        return Finding("gpus", "warning", found, f"the inventory says gpus = {host.gpus}: is the driver loaded?")
    if gpus and min(gpu["memory"] for gpu in gpus) / MIB_PER_GB < host.gpu_memory_gb:
        return Finding("gpus", "warning", found, f"the inventory says gpu_memory_gb = {host.gpu_memory_gb:g}")
    return Finding("gpus", "ok", found)
