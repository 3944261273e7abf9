"""Keys of runs among the keys of a user, and what a real SSH server lets them do."""

import fcntl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.host import admission
from infra.host.ssh_client import client_command
from infra.host.system import free_port
from tests.hosts import HostMachine

OWN = "ssh-ed25519 AAAAown me@here\n# a remark\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "authorized_keys").write_text(OWN)
    return tmp_path / ".ssh" / "authorized_keys"


def test_a_key_is_let_in_once_for_a_job_and_taken_out_again(home: Path, tmp_path: Path) -> None:
    for port in (1000, 1001):
        admission.admit(tmp_path / "job", ["ssh-ed25519 AAAArun rollouts"], port)
    admission.admit(tmp_path / "other", ["ssh-ed25519 AAAAother rollouts"], 1002)
    lines = home.read_text().removeprefix(OWN).splitlines()
    assert len(lines) == 2 and home.read_text().startswith(OWN)
    assert 'permitopen="127.0.0.1:1001"' in lines[0] and lines[0].startswith("restrict,port-forwarding,")
    admission.dismiss(tmp_path / "job")
    assert "AAAArun" not in home.read_text() and "AAAAother" in home.read_text()
    assert home.stat().st_mode & 0o777 == 0o600


def test_a_key_that_jobs_of_one_home_let_in_has_the_ports_of_all(home: Path, tmp_path: Path) -> None:
    """An SSH server looks at the first line of a key alone."""
    for job, port in (("one", 1000), ("other", 1001), ("one", 1002)):
        admission.admit(tmp_path / job, ["ssh-ed25519 AAAArun rollouts"], port)
    lines = {line.rpartition("/")[2]: line for line in home.read_text().removeprefix(OWN).splitlines()}
    assert 'permitopen="127.0.0.1:1001",permitopen="127.0.0.1:1002" ssh-ed25519 AAAArun ' in lines["other"]
    assert 'permitopen="127.0.0.1:1002",permitopen="127.0.0.1:1001" ssh-ed25519 AAAArun ' in lines["one"]
    admission.dismiss(tmp_path / "one")
    (line,) = home.read_text().removeprefix(OWN).splitlines()
    assert "1002" not in line and 'permitopen="127.0.0.1:1001" ssh-ed25519' in line


def test_what_a_killed_job_left_is_swept_out(home: Path, tmp_path: Path) -> None:
    for name in ("lives", "dead"):
        (tmp_path / name).mkdir()
        admission.admit(tmp_path / name, [f"ssh-ed25519 AAAA{name} rollouts"], 1000)
    with (tmp_path / "lives" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        admission.sweep()
    assert "AAAAlives" in home.read_text() and "AAAAdead" not in home.read_text()
    admission.sweep()
    assert home.read_text() == OWN


def test_a_user_without_keys_gets_a_file_that_others_can_t_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    admission.sweep()
    assert not (tmp_path / ".ssh" / "authorized_keys").exists()
    admission.admit(tmp_path / "job", ["ssh-ed25519 AAAArun rollouts"], 1000)
    assert (tmp_path / ".ssh" / "authorized_keys").stat().st_mode & 0o777 == 0o600


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "run-key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


@pytest.fixture
def admitted(hosts: tuple[HostMachine, HostMachine], monkeypatch: pytest.MonkeyPatch) -> Iterator[HostMachine]:
    """A host whose keys are ours to change."""
    monkeypatch.setenv("HOME", str(hosts[0].directory))
    yield hosts[0]
    admission.sweep()


def client(host: HostMachine, key: Path, *further: str, **options: str) -> "subprocess.CompletedProcess[str]":
    command = client_command(22, "root", host.known_hosts, key, {"LogLevel": "INFO", **options})
    return subprocess.run([*command, *further], capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)


def test_the_key_opens_its_port_and_nothing_else(admitted: HostMachine, key: Path, tmp_path: Path) -> None:
    own, other = free_port(), free_port()
    admission.admit(tmp_path / "job", [key.with_suffix(".pub").read_text()], own)
    ran = client(admitted, key, admitted.address, "echo it runs")
    assert ran.returncode == 1 and ran.stdout == ""
    refused = client(admitted, key, "-W", f"127.0.0.1:{other}", admitted.address)
    assert "administratively prohibited" in refused.stderr
    nothing_listens = client(admitted, key, "-W", f"127.0.0.1:{own}", admitted.address)
    assert "Connection refused" in nothing_listens.stderr
    backwards = client(admitted, key, "-N", "-R", f"{other}:127.0.0.1:1", admitted.address, ExitOnForwardFailure="yes")
    assert "remote port forwarding failed" in backwards.stderr


def test_a_key_that_has_expired_is_refused(
    admitted: HostMachine, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "GOOD_FOR_SECONDS", -120.0)
    admission.admit(tmp_path / "job", [key.with_suffix(".pub").read_text()], 1000)
    assert "Permission denied" in client(admitted, key, admitted.address, "true").stderr
