"""Trees to and from a real host, over links that are cut and servers that are killed meanwhile."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from infra.connection import ssh
from infra.connection.remote import Remote
from infra.errors import MachineError
from infra.host import trees
from infra.host.trees import Entry
from infra.inventory import find_host
from infra.transfer import sync
from infra.transfer.library import tree_of
from infra.transfer.sync import fetch_tree, send_tree
from rollouts_core.errors import BadInput
from tests.hosts import HostMachine, write_inventory

Hosts = tuple[HostMachine, HostMachine]
MEBIBYTE = 2**20


@pytest.fixture
def remote(hosts: Hosts) -> Iterator[Remote]:
    remote = Remote("host-a", find_host("host-a"), 120.0).open()
    yield remote
    remote.close()


@pytest.fixture
def carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What large streams go through."""
    monkeypatch.setattr("infra.connection.remote.has_client", lambda: request.param == "ssh")


CARRIERS = pytest.mark.parametrize("carrier", ["ssh", "paramiko"], indirect=True)
FAST_BY_SSH = pytest.mark.parametrize(
    "carrier", ["ssh", pytest.param("paramiko", marks=pytest.mark.slow)], indirect=True
)


def tree(root: Path, **sizes: int) -> list[Entry]:
    root.mkdir()
    for name, size in sizes.items():
        (root / name).write_bytes(os.urandom(size))
    return tree_of(root, sorted(root.iterdir()))


def same(one: Path, other: Path, entries: list[Entry]) -> bool:
    return all((one / path).read_bytes() == (other / path).read_bytes() for path, _, _ in entries)


def during(action: Callable[[], object], fault: Callable[[], object], begun: Callable[[], bool]) -> None:
    """The fault, once the action has begun, while it is at it."""
    failed: list[BaseException] = []

    def act() -> None:
        try:
            action()
        except BaseException as error:
            failed.append(error)

    acting = threading.Thread(target=act)
    acting.start()
    while not begun():
        assert acting.is_alive(), f"it ended before anything could happen: {failed}"
        time.sleep(0.005)
    fault()
    acting.join(240)
    assert not acting.is_alive()
    if failed:
        raise failed[0]


def outage(host: HostMachine, seconds: float) -> Callable[[], None]:
    def cut() -> None:
        host.cut()
        time.sleep(seconds)
        host.mend()

    return cut


def sshd_killed(host: HostMachine) -> Callable[[], None]:
    def kill() -> None:
        host.stop_sshd()
        time.sleep(0.5)
        host.start_sshd()

    return kill


Fault = Callable[[HostMachine], Callable[[], None]]
FAULTS: list[Fault] = [lambda host: outage(host, 2.0), sshd_killed]


def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the fault comes in the middle."""
    frames = trees.frames

    def slow(root: Path, entries: list[Entry], stretches: list[trees.Stretch]) -> Iterator[bytes]:
        for piece in frames(root, entries, stretches):
            time.sleep(0.002)
            yield piece

    monkeypatch.setattr(trees, "frames", slow)


@CARRIERS
@pytest.mark.usefixtures("carrier")
def test_there_and_back_in_several_streams_and_nothing_twice(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "STREAM_BYTES", 4 * MEBIBYTE)
    monkeypatch.setattr(sync, "streams_for", lambda remote: 3)
    entries = tree(tmp_path / "here", large=21 * MEBIBYTE, small=100, empty=0)
    assert send_tree(remote, "inputs", "tree", tmp_path / "here", entries) == 21 * MEBIBYTE + 100
    assert same(tmp_path / "here", Path(remote.work) / "inputs" / "tree", entries)
    assert send_tree(remote, "inputs", "tree", tmp_path / "here", entries) == 0
    assert fetch_tree(remote, "inputs/tree", entries, tmp_path / "back") == 21 * MEBIBYTE + 100
    assert same(tmp_path / "here", tmp_path / "back" / "files", entries)
    assert not list((Path(remote.work) / "incoming").iterdir())


def test_two_that_send_the_same_tree_do_not_disturb_each_other(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one finds that the first has settled it between its question and its stream."""
    entries = tree(tmp_path / "here", **{f"file-{number}": 100 for number in range(20)})
    other, real = Remote("host-a", remote.host, 120.0).open(), sync._in_streams

    def crossed(asking: Remote, *arguments: Any) -> None:
        if asking is remote:
            send_tree(other, "inputs", "tree", tmp_path / "here", entries)
        real(asking, *arguments)

    monkeypatch.setattr(sync, "_in_streams", crossed)
    with closing(other):
        send_tree(remote, "inputs", "tree", tmp_path / "here", entries)
    assert same(tmp_path / "here", Path(remote.work) / "inputs" / "tree", entries)


@FAST_BY_SSH
@pytest.mark.usefixtures("carrier")
@pytest.mark.parametrize("fault", FAULTS, ids=["link cut", "sshd killed"])
def test_sending_goes_on_where_it_stopped(
    remote: Remote,
    hosts: Hosts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
) -> None:
    monkeypatch.setattr(ssh, "SILENCE_SECONDS", 1.0)
    slowly(monkeypatch)
    entries = tree(tmp_path / "here", large=80 * MEBIBYTE)
    incoming = hosts[0].work / "incoming"
    during(
        lambda: send_tree(remote, "inputs", "tree", tmp_path / "here", entries),
        fault(hosts[0]),
        lambda: any(path.stat().st_size > 20 * MEBIBYTE for path in incoming.glob("*/files/large")),
    )
    assert same(tmp_path / "here", hosts[0].work / "inputs" / "tree", entries)


@FAST_BY_SSH
@pytest.mark.usefixtures("carrier")
@pytest.mark.parametrize("fault", FAULTS, ids=["link cut", "sshd killed"])
def test_fetching_goes_on_where_it_stopped(
    remote: Remote,
    hosts: Hosts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
) -> None:
    monkeypatch.setattr(ssh, "SILENCE_SECONDS", 1.0)
    entries = tree(tmp_path / "here", large=200 * MEBIBYTE)
    send_tree(remote, "inputs", "tree", tmp_path / "here", entries)
    large = tmp_path / "back" / "files" / "large"
    during(
        lambda: fetch_tree(remote, "inputs/tree", entries, tmp_path / "back"),
        fault(hosts[0]),
        lambda: large.exists() and large.stat().st_size > 20 * MEBIBYTE,
    )
    assert same(tmp_path / "here", tmp_path / "back" / "files", entries)


@pytest.mark.slow
@CARRIERS
@pytest.mark.usefixtures("carrier")
@pytest.mark.parametrize("direction", ["there", "back"])
def test_half_a_minute_without_link(
    remote: Remote, hosts: Hosts, tmp_path: Path, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = tree(tmp_path / "here", large=600 * MEBIBYTE)
    if direction == "back":
        send_tree(remote, "inputs", "tree", tmp_path / "here", entries)
        action = lambda: fetch_tree(remote, "inputs/tree", entries, tmp_path / "back")  # noqa: E731
        where, result = tmp_path / "back" / "files", tmp_path / "back" / "files"
    else:
        action = lambda: send_tree(remote, "inputs", "tree", tmp_path / "here", entries)  # noqa: E731
        where, result = hosts[0].work / "incoming", hosts[0].work / "inputs" / "tree"
    during(action, outage(hosts[0], 30.0), lambda: any(path.stat().st_size > MEBIBYTE for path in where.rglob("large")))
    assert same(tmp_path / "here", result, entries)


def test_a_disk_that_fills_up_is_said_and_a_second_try_goes_on(hosts: Hosts, tmp_path: Path) -> None:
    write_inventory(tmp_path / "machines.toml", hosts[0], work=tmp_path / "disk" / "work")
    entries = tree(tmp_path / "here", first=4 * MEBIBYTE, second=4 * MEBIBYTE)
    with hosts[0].small_disk(tmp_path / "disk", 6 * 1024) as disk:
        remote = Remote("host-a", find_host("host-a"), 10.0).open()
        with pytest.raises(BadInput, match="host-a: no space left on its disk"):
            send_tree(remote, "inputs", "tree", tmp_path / "here", entries)
        assert not (disk / "work" / "inputs").exists()
        remote.close()


def test_what_arrives_otherwise_than_its_manifest_says_is_refused(remote: Remote, hosts: Hosts, tmp_path: Path) -> None:
    entries = tree(tmp_path / "here", file=1000)
    send_tree(remote, "inputs", "tree", tmp_path / "here", entries)
    there = hosts[0].work / "inputs" / "tree" / "file"
    there.chmod(0o600)
    there.write_bytes(bytes(1000))
    with pytest.raises(MachineError, match="inputs/tree/file is not what its manifest says"):
        fetch_tree(remote, "inputs/tree", entries, tmp_path / "back")
    (tmp_path / "here" / "file").write_bytes(bytes(1000))
    with pytest.raises(MachineError, match="file arrives damaged"):
        send_tree(remote, "inputs", "other", tmp_path / "here", entries)
    assert not (hosts[0].work / "inputs" / "other").exists()


def test_a_file_that_another_artifact_has_does_not_travel(remote: Remote, tmp_path: Path) -> None:
    entries = tree(tmp_path / "here", large=9 * MEBIBYTE, own=10)
    manifest = json.dumps({"files": [{"path": "large", "size": 9 * MEBIBYTE, "sha256": entries[0][2]}]})
    send_tree(remote, "artifacts", "one", tmp_path / "here", entries[:1], manifest)
    assert send_tree(remote, "artifacts", "two", tmp_path / "here", entries, manifest) == 10
