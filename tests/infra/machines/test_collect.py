"""Clearing up a host's store: what its runs say they need stays, whoever led them."""

from pathlib import Path

import pytest

from infra.connection.remote import Remote
from infra.host import collect
from infra.inventory import find_host
from infra.machines.collect import collect_on_machine
from infra.machines.machine import Job
from infra.machines.ssh_machine import SSHMachine
from rollouts_core.config import MachineConfig
from rollouts_core.store.local import LocalStore
from rollouts_core.store.manifest import artifact_named
from tests.hosts import HostMachine

Hosts = tuple[HostMachine, HostMachine]
OLD, NEW, OTHER, UNKNOWN = (f"sft-{letter * 16}" for letter in "abcd")


def note(work: Path, run: str, name: str, *needs: str) -> None:
    collect.note_run(work, run, name, "nobody", needs)


@pytest.fixture
def host(hosts: Hosts) -> HostMachine:
    """With an artifact for each of four names, and a job beside one of them."""
    artifacts = hosts[0].work / "store" / "artifacts"
    for name in (OLD, NEW, OTHER, UNKNOWN):
        (artifacts / name / "files").mkdir(parents=True)
        (artifacts / name / "files" / "data").write_bytes(b"12345")
    (hosts[0].work / "store" / "jobs" / f"serve-{OLD}").mkdir(parents=True)
    note(hosts[0].work, "one-1", "one", OLD)
    note(hosts[0].work, "one-2", "one", NEW)
    note(hosts[0].work, "two-1", "two", OTHER)
    return hosts[0]


def there(host: HostMachine) -> set[str]:
    return {path.name for path in (host.work / "store" / "artifacts").iterdir()}


def collected(host: HostMachine, store: LocalStore, keep_last: int | None, dry_run: bool = False) -> list[str]:
    removed = collect_on_machine(host.name, find_host(host.name), store, keep_last, dry_run)
    return [f"{removal.kind} {removal.name} {removal.size}" for removal in removed]


def test_what_no_run_named_goes_and_the_rest_stays(host: HostMachine, tmp_path: Path) -> None:
    assert collected(host, LocalStore(tmp_path / "store"), None) == [f"artifact {UNKNOWN} 5"]
    assert there(host) == {OLD, NEW, OTHER}


def test_the_last_runs_of_each_name_are_kept(host: HostMachine, tmp_path: Path) -> None:
    expected = [f"artifact {OLD} 5", f"artifact {UNKNOWN} 5", f"job serve-{OLD} 0"]
    store = LocalStore(tmp_path / "store")
    assert collected(host, store, 1, dry_run=True) == expected
    assert there(host) == {OLD, NEW, OTHER, UNKNOWN}
    assert collected(host, store, 1) == expected
    assert there(host) == {NEW, OTHER}
    assert {noted["run"] for noted in collect.noted_runs(host.work)} == {"one-2", "two-1"}


def test_what_a_running_job_reads_stays(host: HostMachine, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    remote = Remote(host.name, find_host(host.name), 20.0).open()
    machine = SSHMachine(remote, store, MachineConfig(kind="ssh", name=host.name), "a test")
    machine.start_beside(Job("rl-1", ("sleep", "60"), {"inputs": [UNKNOWN]}, 60.0, 60.0, 60.0))
    collected(host, store, 0)
    assert there(host) == {UNKNOWN}
    machine.cancel("rl-1")
    machine.release()


def test_a_live_run_keeps_what_it_needs(host: HostMachine, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    remote = Remote(host.name, find_host(host.name), 20.0).open()
    machine = SSHMachine(remote, store, MachineConfig(kind="ssh", name=host.name), "a test")
    machine.note_run("one-3", "one", [artifact_named(OLD)])
    list(machine.claim([]))
    collected(host, store, 0)
    assert there(host) == {OLD}
    machine.release()


def test_a_run_that_nobody_asked_about_stops_it(host: HostMachine) -> None:
    assert collect.collect(host.work, [], ["one-1", "one-2"], [], False) is None
    assert there(host) == {OLD, NEW, OTHER, UNKNOWN}
