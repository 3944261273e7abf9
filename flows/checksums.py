"""`rollouts checksums RUN`: what the replicas of a running policy hold, compared."""

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flows.following import jobs_of
from flows.preflight import store_named
from infra.provisioning.provision import reach_machine
from rollouts_core.errors import BadInput
from rollouts_core.observe.run_list import find_run
from rollouts_core.observe.run_records import RunRecord

SERVES = "serve"
"""The stage of the policy's servers."""


def checksums_command(options: argparse.Namespace) -> int:
    """Exit status 1 where a replica holds other weights than most of its version."""
    store = store_named(options.store)
    record = find_run(store.home, options.run)
    found: list[Mapping[str, Any]] = []
    for machine_name, job in _servers_of(record):
        with reach_machine(machine_name, store) as machine:
            found += machine.checksums(job)
    if not found:
        raise BadInput(f"run {record.run_id} has no servers now; `rollouts show {record.run_id}` says what it has done")
    others = strangers(found)
    if options.json:
        print(json.dumps([{**replica, "agrees": replica["name"] not in others} for replica in found]))
    else:
        _print(found, others)
    return 1 if others else 0


def strangers(found: Sequence[Mapping[str, Any]]) -> set[str]:
    """The names of replicas that do not hold what most of their version hold; of two that differ, both."""
    held = [(replica["version"], replica["checksum"]) for replica in found if "checksum" in replica]
    versions, counted = Counter(version for version, _ in held), Counter(held)
    return {
        str(replica["name"])
        for replica in found
        if "checksum" in replica
        and 2 * counted[replica["version"], replica["checksum"]] <= versions[replica["version"]]
        and counted[replica["version"], replica["checksum"]] < versions[replica["version"]]
    }


def _servers_of(record: RunRecord) -> list[tuple[str, str]]:
    """Machine and job of what tells the trainer of the policy's servers."""
    jobs = jobs_of(record)
    trainers = {(job.machine, f"serve-{job.job}") for job in jobs if job.stage != SERVES}
    return sorted({(job.machine, job.job) for job in jobs if job.stage == SERVES} & trainers)


def _print(found: Sequence[Mapping[str, Any]], others: set[str]) -> None:
    width = max(len(replica["name"]) for replica in found)
    for replica in found:
        if "checksum" not in replica:
            print(f"{replica['name']:<{width}}  {replica['problem']}")
            continue
        said = "  DIFFERS from the others of this version" if replica["name"] in others else ""
        print(f"{replica['name']:<{width}}  version {replica['version']:<6}  {replica['checksum'][:32]}{said}")
