"""Hosts on this machine: network namespaces, each with a real sshd, joined to us by a bridge. Needs root.

    us 10.113.N.1 --- bridge --- 10.113.N.2 host-a
                            \\--- 10.113.N.3 host-b
                            \\--- 10.113.N.4 host-c

A link that is cut loses packets in silence, as a sleeping laptop's does. Each test session has a network of its own: N
is the first number whose lock is free, and what a killed session left under it is cleared away.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rollouts_core.store.locks import try_lock

NETWORKS = 16
DEADLINE = 20.0
LETTERS = "abc"
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


@dataclass(frozen=True)
class HostMachine:
    """One host: its namespace, address and directory."""

    name: str
    namespace: str
    address: str
    directory: Path
    client_key: Path
    work: Path

    @property
    def known_hosts(self) -> Path:
        return self.directory / "known_hosts"

    def run(self, *command: str) -> None:
        """Run a command on the host's network."""
        subprocess.run(["ip", "netns", "exec", self.namespace, *command], check=True)

    @contextmanager
    def small_disk(self, directory: Path, kilobytes: int) -> Iterator[Path]:
        """A disk at a directory of the host, seen only there; yields where it is seen from here."""
        directory.mkdir()
        sshd = (self.directory / "sshd.pid").read_text().strip()
        enter = ["nsenter", "--target", sshd, "--mount"]
        subprocess.run(
            [*enter, "mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(directory)], check=True
        )
        try:
            yield Path(f"/proc/{sshd}/root{directory}")
        finally:
            subprocess.run([*enter, "umount", "-l", str(directory)], check=True)

    def idle(self) -> bool:
        """Whether, after a moment, nothing but the SSH server runs there."""
        end = time.monotonic() + DEADLINE
        while len(self.processes()) > 1 and time.monotonic() < end:
            time.sleep(0.05)
        return len(self.processes()) == 1

    def cut(self) -> None:
        _ip("link", "set", f"v-{self.namespace}", "down")

    def mend(self) -> None:
        _ip("link", "set", f"v-{self.namespace}", "up")

    @contextmanager
    def slow(self, kilobits: int) -> Iterator[None]:
        """So many a second reach it."""
        link = ["dev", f"v-{self.namespace}", "root"]
        rate = ["tbf", "rate", f"{kilobits}kbit", "burst", "16kb", "latency", "400ms"]
        subprocess.run(["tc", "qdisc", "add", *link, *rate], check=True)
        try:
            yield
        finally:
            subprocess.run(["tc", "qdisc", "del", *link], check=True)

    def processes(self) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True)
        return [int(pid) for pid in found.stdout.split()]

    def stop_sshd(self) -> None:
        """The server and all its sessions; what was detached runs on."""
        for pid in self.processes():
            if b"sshd" in _command_line(pid):
                _kill(pid)

    def start_sshd(self) -> None:
        subprocess.run(
            ["ip", "netns", "exec", self.namespace, "/usr/sbin/sshd", "-f", str(self.directory / "sshd_config"),
             "-E", str(self.directory / "sshd.log")], check=True,
        )  # fmt: skip
        end = time.monotonic() + DEADLINE
        while True:
            try:
                socket.create_connection((self.address, 22), 1).close()
                return
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def kill_everything(self) -> None:
        while pids := self.processes():
            for pid in pids:
                _kill(pid)
            time.sleep(0.02)

    def reboot(self) -> None:
        """Every process is gone, and the SSH server back a moment later."""
        self.kill_everything()
        time.sleep(1.0)
        self.start_sshd()

    def restart(self) -> None:
        """With nothing of what ran before."""
        if any(b"sshd" not in _command_line(pid) for pid in self.processes()) or not self.processes():
            self.kill_everything()
            self.start_sshd()

    def table(self, **fields: object) -> str:
        """Its lines in an inventory."""
        values = {
            "host": self.address,
            "user": "root",
            "key": self.client_key,
            "known_hosts": self.known_hosts,
            "work": self.work,
            "python": sys.executable,
            "environment": "own",
            "gpus": 1,
            **fields,
        }
        lines = [f"{name} = {_toml(value)}" for name, value in values.items()]
        return "\n".join([f"[{self.name}]", *lines, ""])


def write_inventory(path: Path, *hosts: HostMachine, **fields: object) -> None:
    path.write_text("\n".join(host.table(**fields) for host in hosts))


def hosts_impossible() -> str:
    """Why there can be no hosts here; empty where there can."""
    missing = [program for program in ("sshd", "ip", "ssh-keygen") if shutil.which(program, path=PATH) is None]
    if missing:
        return f"hosts need {', '.join(missing)}: install openssh-server and iproute2"
    if os.geteuid() != 0:
        return "hosts need root, for network namespaces"
    probe = f"rollouts-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        return "hosts need the right to make network namespaces"
    _ip("netns", "del", probe)
    return ""


@contextmanager
def three_running(directory: Path) -> Iterator[tuple[HostMachine, ...]]:
    """All hosts, up; gone with all their processes afterwards."""
    key = directory / "client-key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    with _network() as number:
        hosts = []
        for place, letter in enumerate(LETTERS, 2):
            home = directory / f"host-{letter}"
            address = f"10.113.{number}.{place}"
            hosts.append(HostMachine(home.name, _namespace(number, letter), address, home, key, home / "work"))
            _make(hosts[-1], _bridge(number))
        yield tuple(hosts)


@contextmanager
def _network() -> Iterator[int]:
    """A number that is ours for as long as this process lives, with its bridge; all of it is removed in the end."""
    for number in range(NETWORKS):
        lock = open(f"/run/rollouts-hosts-{number}.lock", "w")  # noqa: SIM115
        if try_lock(lock.fileno()):
            break
        lock.close()
    with lock:
        _remove(number)
        _ip("link", "add", _bridge(number), "type", "bridge")
        try:
            _ip("addr", "add", f"10.113.{number}.1/24", "dev", _bridge(number))
            _ip("link", "set", _bridge(number), "up")
            yield number
        finally:
            _remove(number)


def _make(host: HostMachine, bridge: str) -> None:
    host.directory.mkdir()
    host_key = host.directory / "host-key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(host_key)], check=True)
    public = host_key.with_suffix(".pub").read_text().split()
    host.known_hosts.write_text(f"{host.address} {public[0]} {public[1]}\n")
    keys = host.directory / ".ssh" / "authorized_keys"
    keys.parent.mkdir(mode=0o700)
    shutil.copyfile(host.client_key.with_suffix(".pub"), keys)
    (host.directory / "sshd_config").write_text(
        f"ListenAddress {host.address}:22\nHostKey {host_key}\nAuthorizedKeysFile {keys}\n"
        f"PidFile {host.directory}/sshd.pid\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
        f"PermitRootLogin prohibit-password\nMaxStartups 100\nMaxSessions 100\nX11Forwarding no\n"
        f"Subsystem sftp internal-sftp\n"
        f"SetEnv HOME={host.directory} SLURM_CONF={host.directory}/slurm/slurm.conf OMP_NUM_THREADS=1\n"
    )
    _ip("netns", "add", host.namespace)
    link = f"v-{host.namespace}"
    _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
    _ip("link", "set", link, "master", bridge)
    _ip("link", "set", link, "up")
    host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
    host.run("ip", "link", "set", "eth0", "up")
    host.run("ip", "link", "set", "lo", "up")
    host.start_sshd()


def _remove(number: int) -> None:
    for namespace in (_namespace(number, letter) for letter in LETTERS):
        for _ in range(50):
            found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout.split()
            for pid in found:
                _kill(int(pid))
            if not found:
                break
            time.sleep(0.02)
        subprocess.run(["ip", "link", "del", f"v-{namespace}"], capture_output=True)
        subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
    subprocess.run(["ip", "link", "del", _bridge(number)], capture_output=True)


def _namespace(number: int, letter: str) -> str:
    return f"rollouts{number}{letter}"


def _bridge(number: int) -> str:
    return f"rollouts{number}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) if isinstance(value, int) else f'"{value}"'
