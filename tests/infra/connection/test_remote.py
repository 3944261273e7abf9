"""Reaching hosts: what is refused, how it is said, and that nothing is left behind. Real sshd, in namespaces."""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from infra.connection.remote import Remote
from infra.errors import MachineError, Unreachable
from infra.inventory import find_host
from infra.machines.check import check_machine, refuse_unfit
from rollouts_core.errors import BadInput
from tests.hosts import HostMachine, write_inventory

Hosts = tuple[HostMachine, HostMachine]


@pytest.fixture
def machines_file(tmp_path: Path) -> Path:
    return tmp_path / "machines.toml"


def opened(name: str = "host-a", patience: float = 5.0) -> Remote:
    remote = Remote(name, find_host(name), patience)
    try:
        return remote.open()
    except BaseException:
        remote.close()
        raise


def refusal() -> str:
    with pytest.raises(BadInput) as caught:
        opened().close()
    return str(caught.value)


def accepting_command(message: str) -> str:
    return message.rpartition("accept it with\n")[2].strip()


def test_a_host_says_what_it_is_and_its_agent_ends_with_the_connection(hosts: Hosts) -> None:
    remote = opened()
    facts = remote.call("facts")
    assert facts["interpreter"] == sys.executable
    assert facts["work"] == str(hosts[0].work)
    remote.close()
    assert hosts[0].idle()


def test_an_unknown_host_key_is_refused_and_the_command_given_accepts_it(hosts: Hosts) -> None:
    hosts[0].known_hosts.rename(hosts[0].directory / "kept")
    try:
        message = refusal()
        assert "is unknown" in message
        assert not hosts[0].work.exists()
        subprocess.run(accepting_command(message), shell=True, check=True)
        opened().close()
    finally:
        (hosts[0].directory / "kept").rename(hosts[0].known_hosts)


def test_a_changed_host_key_is_refused_and_the_command_given_accepts_it(hosts: Hosts) -> None:
    before = hosts[0].known_hosts.read_text()
    try:
        hosts[0].known_hosts.write_text(hosts[1].known_hosts.read_text().replace(hosts[1].address, hosts[0].address))
        message = refusal()
        assert "HAS CHANGED" in message
        subprocess.run(accepting_command(message), shell=True, check=True, capture_output=True)
        opened().close()
    finally:
        hosts[0].known_hosts.write_text(before)


def test_a_key_that_the_host_does_not_know(hosts: Hosts, tmp_path: Path, machines_file: Path) -> None:
    key = tmp_path / "other-key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    write_inventory(machines_file, hosts[0], key=key)
    message = refusal()
    assert f"refuses root with the key {key}" in message
    assert "ssh-copy-id" in message
    write_inventory(machines_file, hosts[0], key=tmp_path / "none")
    assert f"there is no private key {tmp_path}/none" in refusal()


def test_a_host_without_python(hosts: Hosts, machines_file: Path) -> None:
    write_inventory(machines_file, hosts[0], python="python3.99")
    assert "there is no python3.99 there: install Python 3.11" in refusal()
    assert hosts[0].idle()


def test_a_host_with_an_old_python(hosts: Hosts, machines_file: Path, tmp_path: Path) -> None:
    """As far as it says itself: an old interpreter is not to be had here."""
    old = tmp_path / "python"
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.version_info = (3, 8, 1); sys.version = '3.8.1 (old)'")
    old.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    old.chmod(0o755)
    write_inventory(machines_file, hosts[0], python=old)
    assert "is Python 3.8.1, and 3.11 or later is needed" in refusal()
    assert not hosts[0].work.exists()


def test_a_work_directory_that_cannot_be_written(hosts: Hosts, machines_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    write_inventory(machines_file, hosts[0], work=tmp_path / "file" / "work")
    assert "its work directory can't be used: Not a directory" in refusal()


def test_a_disk_that_is_full(hosts: Hosts, machines_file: Path, tmp_path: Path) -> None:
    write_inventory(machines_file, hosts[0], work=tmp_path / "disk" / "work")
    with hosts[0].small_disk(tmp_path / "disk", 64) as disk:
        with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        assert "no space left on its disk" in refusal()
        assert [path.name for path in disk.rglob("*") if path.is_file()] == ["filler"]


def test_a_clock_an_hour_off(hosts: Hosts, machines_file: Path, tmp_path: Path) -> None:
    late = tmp_path / "python"
    late.write_text(f'#!/bin/sh\nexec faketime -f +1h {sys.executable} "$@"\n')
    late.chmod(0o755)
    write_inventory(machines_file, hosts[0], python=late)
    remote = opened()
    with pytest.raises(BadInput, match=r"host-a: clock: (3599|3600|3601) s ahead: set it"):
        refuse_unfit("host-a", remote.call("facts"))
    remote.close()


def test_a_name_that_does_not_resolve_and_a_port_where_nothing_listens(hosts: Hosts, machines_file: Path) -> None:
    write_inventory(machines_file, hosts[0], host="no-such-host.invalid")
    with pytest.raises(Unreachable, match="no host of that name is known"):
        opened(patience=0.0)
    write_inventory(machines_file, hosts[0], port=2222, known_hosts=hosts[0].known_hosts)
    with pytest.raises(Unreachable, match=r"10\.113\.\d+\.2:2222"):
        opened(patience=0.0)


def test_through_a_jump_host(hosts: Hosts, machines_file: Path) -> None:
    text = hosts[0].table() + "\n" + hosts[1].table(jump="host-a")
    machines_file.write_text(text)
    remote = opened("host-b")
    peer = subprocess.run(
        ["ip", "netns", "exec", hosts[1].namespace, "ss", "-Htn", "state", "established", "sport", "=", ":22"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert hosts[0].address in peer
    assert f"{hosts[0].address.rpartition('.')[0]}.1" not in peer
    remote.close()


def test_a_call_outlasts_a_cut_link(hosts: Hosts) -> None:
    remote = opened(patience=60.0)
    hosts[0].cut()
    with pytest.raises(Unreachable):
        remote.call("busy", deadline=1.0, patience=0.0)
    hosts[0].mend()
    assert remote.call("busy") == {"jobs": [], "leases": [], "servers": {}}
    remote.close()


def test_what_would_leave_the_work_directory_is_refused(hosts: Hosts) -> None:
    remote = opened()
    with pytest.raises(MachineError, match=r"'../../etc' is not a valid name"):
        remote.call("artifact", name="../../etc")
    with pytest.raises(MachineError, match="does not name a file inside"):
        remote.call("offer", shelf="inputs", name="evil", entries=[["../../evil", 1, "0" * 64]])
    with pytest.raises(MachineError, match="is not a valid name"):
        remote.call("cancel", job="..")
    remote.close()


def test_a_check_says_everything_and_what_to_do(hosts: Hosts) -> None:
    found = {finding.what: finding for finding in check_machine("host-a", find_host("host-a"))}
    assert [*found] == ["connection", "python", "disk", "gpus", "clock", "logout", "jobs", "leases"]
    assert found["gpus"].state == "warning"
    assert "gpus = 1" in found["gpus"].advice
    assert all(finding.state == "ok" for name, finding in found.items() if name != "gpus")
