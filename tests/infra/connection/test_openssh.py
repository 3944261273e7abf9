"""Streams through OpenSSH's own client, to a real sshd: the same keys, the same refusals, and nothing left behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.connection.openssh import client_stream
from infra.connection.remote import Remote
from infra.inventory import Host, find_host
from infra.transfer import sync
from infra.transfer.library import tree_of
from infra.transfer.sync import send_tree
from tests.hosts import HostMachine

Hosts = tuple[HostMachine, HostMachine]
DEADLINE = 30.0
OWNER = """
import sys, time
from infra.connection.openssh import client_stream
from infra.inventory import find_host
with client_stream(find_host("host-a"), ["cat"]) as stream:
    stream.sendall(b"ready\\n")
    sys.stdout.buffer.write(stream.recv(6))
    sys.stdout.flush()
    time.sleep(600)
"""


@pytest.fixture
def machines_file(tmp_path: Path) -> Path:
    return tmp_path / "machines.toml"


def echoed(host: Host, data: bytes) -> bytes:
    """What `cat` there says."""
    said = b""
    with client_stream(host, ["cat"]) as stream:
        stream.sendall(data)
        stream.shutdown_write()
        while piece := stream.recv(2**16):
            said += piece
    return said


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_bytes_come_back_as_they_went_through_a_jump_host_and_names_that_need_quotes(
    hosts: Hosts, machines_file: Path, tmp_path: Path
) -> None:
    odd = tmp_path / "a key of 100%h"
    odd.mkdir()
    for file in (hosts[0].client_key, hosts[0].known_hosts, hosts[1].known_hosts):
        with (odd / file.name).open("ab") as joined:
            joined.write(file.read_bytes())
    (odd / hosts[0].client_key.name).chmod(0o600)
    tables = [host.table(key=str(odd / host.client_key.name), known_hosts=str(odd / host.known_hosts.name), **more)
              for host, more in ((hosts[0], {}), (hosts[1], {"jump": "host-a"}))]  # fmt: skip
    machines_file.write_text("\n".join(tables))
    data = os.urandom(3_000_000)
    assert echoed(find_host("host-a"), data) == data
    assert echoed(find_host("host-b"), data) == data


def test_a_host_key_that_is_not_listed_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    there = tmp_path / "there"
    before = hosts[0].known_hosts.read_text()
    try:
        for text in ("", hosts[1].known_hosts.read_text().replace(hosts[1].address, hosts[0].address)):
            hosts[0].known_hosts.write_text(text)
            with client_stream(find_host("host-a"), ["touch", str(there)]) as stream:
                assert not stream.recv(1)
                assert b"Host key verification failed" in stream.recv_stderr(2**16)
                assert stream.lost
    finally:
        hosts[0].known_hosts.write_text(before)
    assert not there.exists()


def test_the_stream_behind_a_lost_one_goes_through_paramiko(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "STREAM_BYTES", 2**20)
    client = tmp_path / "bin" / "ssh"
    client.parent.mkdir()
    client.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\nexit 255\n")
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{client.parent}:{os.environ['PATH']}")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "large").write_bytes(os.urandom(3 * 2**20))
    remote = Remote("host-a", find_host("host-a"), 20.0).open()
    try:
        entries = tree_of(tmp_path / "here", [tmp_path / "here" / "large"])
        assert send_tree(remote, "inputs", "tree", tmp_path / "here", entries) == 3 * 2**20
    finally:
        remote.close()
    assert (tmp_path / "asked").read_text() == "asked\n"
    shutil.rmtree(hosts[0].work / "inputs")


def test_nothing_is_left_of_a_stream_whose_owner_was_killed(hosts: Hosts) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE)
    assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
    (client,) = Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split()
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    wait_until(lambda: not Path(f"/proc/{client}").exists())
    wait_until(hosts[0].idle)
