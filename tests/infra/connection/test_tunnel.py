"""Tunnels to a server on a host's loopback."""

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.connection.remote import Remote
from infra.connection.tunnel import tunnel
from infra.inventory import find_host
from tests.hosts import HostMachine

Hosts = tuple[HostMachine, HostMachine]
PORT = 8123


@pytest.fixture
def served(hosts: Hosts, tmp_path: Path) -> Iterator[Path]:
    """A web server on the host's loopback, of this directory."""
    content = tmp_path / "served"
    content.mkdir()
    (content / "large").write_bytes(bytes(range(256)) * 20_000)
    command = [sys.executable, "-m", "http.server", str(PORT), "--bind", "127.0.0.1", "--directory", str(content)]
    server = subprocess.Popen(
        ["ip", "netns", "exec", hosts[0].namespace, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    yield content
    server.kill()
    server.wait()


def fetched(port: int) -> bytes:
    for attempt in range(20):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/large", timeout=10) as answer:
                data: bytes = answer.read()
                return data
        except OSError:
            if attempt == 19:
                raise
    raise AssertionError("unreachable")


def test_many_at_once_and_the_same_port_after_the_server_was_killed(hosts: Hosts, served: Path) -> None:
    remote = Remote("host-a", find_host("host-a"), 30.0).open()
    whole = (served / "large").read_bytes()
    with tunnel(remote, PORT) as port:
        fetched(port)
        with ThreadPoolExecutor(8) as pool:
            assert all(data == whole for data in pool.map(lambda _: fetched(port), range(16)))
        hosts[0].stop_sshd()
        hosts[0].start_sshd()
        assert fetched(port) == whole
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/large", timeout=5)
    remote.close()


def test_a_port_where_nothing_listens_closes_the_connection(hosts: Hosts) -> None:
    remote = Remote("host-a", find_host("host-a"), 30.0).open()
    with tunnel(remote, 9) as port, pytest.raises(OSError, match=r"closed|reset"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5)
    remote.close()
