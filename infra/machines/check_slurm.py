"""Whether a Slurm cluster is fit: its partitions, what one may use, what its nodes see."""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from infra.connection.remote import Remote
from infra.inventory import Slurm
from infra.machines.finding import Finding
from infra.machines.submission import chosen_options

ANSWER_SECONDS = 90.0
NEARLY_FULL = 0.9
LIMITS = {
    "maxjobs": "jobs at once:", "maxsubmit": "jobs in the queue:", "maxwall": "time of a job:", "maxtres": "of a job:",
    "grptres": "of all jobs:",
}  # fmt: skip
"""Limits of an account: `sacctmgr`'s names, and names for people."""


def check_cluster(remote: Remote, slurm: Slurm) -> Iterator[Finding]:
    """Check a Slurm cluster. Yields its findings."""
    programs = [*shlex.split(slurm.container or "")[:1], *(["sshfs"] if slurm.sshfs else [])]
    told = remote.call(
        "cluster", ANSWER_SECONDS, partition=slurm.partition, options=chosen_options(slurm), python=remote.host.python,
        local_disk=slurm.local_disk or "", programs=" ".join(programs),
    )  # fmt: skip
    if "error" in told:
        advice = "is it a login node, and does `sinfo` work there?"
        yield Finding("slurm", "failed", told["error"], advice)
        return
    yield Finding("slurm", "ok", told["version"])
    yield partition_finding(slurm.partition, told["partitions"])
    if slurm.cpu_partition:
        yield partition_finding(slurm.cpu_partition, told["partitions"], "cpu_partition")
    if told["accounts"] is not None:
        yield accounts_finding(slurm, told["accounts"])
    yield from map(quota_finding, told["quotas"])
    yield from node_findings(told["node"], remote.work, slurm)


def partition_finding(wanted: str | None, rows: list[Mapping[str, str]], field: str = "partition") -> Finding:
    """The partition that jobs go to, with its limit and what its nodes have."""
    names = ", ".join(sorted({row["partition"].rstrip("*") for row in rows}))
    own = [row for row in rows if (row["partition"].rstrip("*") == wanted if wanted else "*" in row["partition"])]
    if not own:
        lacks = f"there is no partition {wanted!r}" if wanted else "the cluster has no default partition"
        return Finding(field, "failed", lacks, f"set slurm.{field} to one of {names}")
    have = "; ".join(f"{row['nodes']} nodes with {_gres(row['gres'])}" for row in own)
    found = f"{own[0]['partition'].rstrip('*')}: {have}, at most {own[0]['limit']} a job"
    if all(row["state"] != "up" for row in own):
        return Finding(field, "failed", f"{found}, {own[0]['state']}", f"set slurm.{field} to one of {names}")
    return Finding(field, "ok", found)


def accounts_finding(slurm: Slurm, rows: list[Mapping[str, str]]) -> Finding:
    """The accounts that may be used, the qualities of service with them, and what limits their jobs."""
    accounts = {row["account"] for row in rows}
    if slurm.account and slurm.account not in accounts:
        advice = f"set slurm.account to one of {', '.join(sorted(accounts)) or 'those that an administrator gives you'}"
        return Finding("account", "failed", f"you do not belong to account {slurm.account!r}", advice)
    chosen = [row for row in rows if slurm.account in (None, row["account"])]
    allowed = {qos for row in chosen for qos in row["qos"].split(",")}
    if slurm.qos and chosen and slurm.qos not in allowed:
        advice = f"set slurm.qos to one of {', '.join(sorted(allowed))}"
        return Finding("account", "failed", f"quality of service {slurm.qos!r} is not yours", advice)
    return Finding("account", "ok", "; ".join(map(_account, chosen)) or "none is asked for")


def quota_finding(quota: Mapping[str, Any]) -> Finding:
    """How much of a quota is used."""
    share = quota["used"] / quota["limit"]
    found = f"{quota['where']}: {share:.0%} of {quota['limit'] / 2**30:,.1f} GiB are used"
    if share >= NEARLY_FULL:
        return Finding("quota", "warning", found, "free some; `rollouts machines gc` removes what no kept run needs")
    return Finding("quota", "ok", found)


def node_findings(node: Mapping[str, Any], work: str, slurm: Slurm) -> Iterator[Finding]:
    """The findings of a job on a node."""
    if "error" in node:
        advice = "check again when a node is free; what nodes see is not known until then"
        yield Finding("node", "warning", node["error"], advice)
        return
    yield Finding("node", "ok", f"{node['node']}: Python {node['python']}")
    yield _shared_finding(node, work, slurm)
    if not node["network"]:
        advice = "name a directory of wheels here with `wheels`: environments are built in a job"
        yield Finding("network", "warning", f"{node['node']} does not reach pypi.org", advice)
    if slurm.local_disk:
        yield Finding("local disk", "ok", f"{node['disk_free'] / 2**30:.1f} GiB free at {slurm.local_disk}")
    if slurm.container and (program := shlex.split(slurm.container)[0]) in node["lacks"]:
        advice = "name it with its whole path in slurm.container, or load its module"
        yield Finding("container", "failed", f"{program} is not on {node['node']}", advice)


def _shared_finding(node: Mapping[str, Any], work: str, slurm: Slurm) -> Finding:
    if slurm.sshfs and "sshfs" in node["lacks"]:
        return Finding("shared", "failed", f"sshfs is not on {node['node']}", "have it installed, or load its module")
    if slurm.sshfs and not node["namespaces"]:
        lacks = f"{node['node']} gives users no mount namespaces (unshare --user --mount)"
        return Finding("shared", "failed", lacks, "ask for them, or for a directory that all nodes share")
    if slurm.sshfs:
        return Finding("shared", "ok", f"{node['node']} mounts {work} from the login node")
    if not node["sees"]:
        advice = "name a directory that login and compute nodes share with `work`; where there is none, set slurm.sshfs"
        return Finding("shared", "failed", f"{work} of the login node is not seen on {node['node']}", advice)
    return Finding("shared", "ok", f"{work} is seen on {node['node']}")


def _account(row: Mapping[str, str]) -> str:
    limits = [f"{LIMITS[name]} {row[name]}" for name in LIMITS if row[name]]
    where = f" on {row['partition']}" if row["partition"] else ""
    return f"{row['account']}{where} (qos {row['qos']}{''.join(f', {limit}' for limit in limits)})"


def _gres(gres: str) -> str:
    return "no GPU" if gres in ("", "(null)") else gres
