"""Whether a Slurm cluster is fit: its partitions, what one may use, what its nodes see."""

from collections.abc import Iterator, Mapping
from typing import Any

from infra.connection.remote import Remote
from infra.inventory import Slurm
from infra.machines.finding import Finding
from infra.machines.submission import chosen_options

ANSWER_SECONDS = 90.0


def check_cluster(remote: Remote, slurm: Slurm) -> Iterator[Finding]:
    """One finding after another."""
    told = remote.call(
        "cluster", ANSWER_SECONDS, partition=slurm.partition, options=chosen_options(slurm), python=remote.host.python
    )
    if "error" in told:
        advice = "is it a login node, and does `sinfo` work there?"
        yield Finding("slurm", "failed", told["error"], advice)
        return
    yield Finding("slurm", "ok", told["version"])
    yield partition_finding(slurm.partition, told["partitions"])
    if told["accounts"] is not None:
        yield accounts_finding(slurm, told["accounts"])
    yield from node_findings(told["node"], remote.work)


def partition_finding(wanted: str | None, rows: list[Mapping[str, str]]) -> Finding:
    """The partition that jobs go to, with its limit and what its nodes have."""
    names = ", ".join(sorted({row["partition"].rstrip("*") for row in rows}))
    own = [row for row in rows if (row["partition"].rstrip("*") == wanted if wanted else "*" in row["partition"])]
    if not own:
        lacks = f"there is no partition {wanted!r}" if wanted else "the cluster has no default partition"
        return Finding("partition", "failed", lacks, f"set slurm.partition to one of {names}")
    have = "; ".join(f"{row['nodes']} nodes with {_gres(row['gres'])}" for row in own)
    found = f"{own[0]['partition'].rstrip('*')}: {have}, at most {own[0]['limit']} a job"
    if all(row["state"] != "up" for row in own):
        return Finding("partition", "failed", f"{found}, {own[0]['state']}", f"set slurm.partition to one of {names}")
    return Finding("partition", "ok", found)


def accounts_finding(slurm: Slurm, rows: list[str]) -> Finding:
    """The accounts that may be used, and the qualities of service with them."""
    accounts = {row.partition("|")[0] for row in rows}
    if slurm.account and slurm.account not in accounts:
        advice = f"set slurm.account to one of {', '.join(sorted(accounts)) or 'those that an administrator gives you'}"
        return Finding("account", "failed", f"you do not belong to account {slurm.account!r}", advice)
    return Finding("account", "ok", "; ".join(row.replace("|", " ") for row in rows) or "none is asked for")


def node_findings(node: Mapping[str, Any], work: str) -> Iterator[Finding]:
    """What a job on a node found there."""
    if "error" in node:
        advice = "check again when a node is free; what nodes see is not known until then"
        yield Finding("node", "warning", node["error"], advice)
        return
    yield Finding("node", "ok", f"{node['node']}: Python {node['python']}")
    if not node["sees"]:
        advice = "name a directory that login and compute nodes share with `work`"
        yield Finding("shared", "failed", f"{work} of the login node is not seen on {node['node']}", advice)
        return
    yield Finding("shared", "ok", f"{work} is seen on {node['node']}")
    if not node["network"]:
        advice = "name a directory of wheels here with `wheels`: environments are built in a job"
        yield Finding("network", "warning", f"{node['node']} does not reach pypi.org", advice)


def _gres(gres: str) -> str:
    return "no GPU" if gres in ("", "(null)") else gres
