"""Runs whose engines are on other machines than the trainer: the same bits, and nothing is left behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Done
from tests.flows.test_remote_run import made, variables  # noqa: F401
from tests.hosts import HostMachine

Hosts = tuple[HostMachine, ...]
Rollouts = Callable[..., Done]
ENGINE: dict[str, Any] = {
    "kind": "embedded",
    "machines": {"names": ["host-b", "host-c"]},
    "replicas": 2,
    "start_minutes": 2.0,
}


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["here", "host-a"])
def test_engines_on_other_machines_give_the_bits_of_one_machine(
    trainer: str,
    rollouts: Rollouts,
    config_file: Callable[..., Path],
    three_hosts: Hosts,
    variables: dict[str, str],  # noqa: F811
    tmp_path: Path,
) -> None:
    machine = {"device": "cpu", "environment": ["OMP_NUM_THREADS"]}
    machine |= {} if trainer == "here" else {"kind": "ssh", "name": "host-a"}
    kept = {"results": {"artifacts": ["rl"]}}
    stores = []
    for place in ({}, {"engine": ENGINE, "machine": machine}):
        store = tmp_path / f"store-{len(place)}"
        done = rollouts("run", config_file(sft={"steps": 40}, **kept, **place), "--json", "--store", store, **variables)
        assert done.status == 0, done.err
        stores.append(made(store, "rl"))
    assert stores[0] == stores[1] and len(stores[0]) == 2
    assert all(host.idle() for host in three_hosts)
    for host in three_hosts[1:]:
        assert "rollouts-servers" not in (host.directory / ".ssh" / "authorized_keys").read_text()
