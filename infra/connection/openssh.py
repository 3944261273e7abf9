"""A command on a host through OpenSSH's own client, where it is installed: what moves much goes through it.

Decision: Python encrypts slower than OpenSSH, and on cores that the receiving side may need. So calls go through
paramiko, which holds one connection open, and large streams through a process of `ssh` each. It is given the host keys
and the private key that the inventory names, and reads no configuration of its own: what one of the two refuses, the
other must refuse.

The process ends with whoever opened it: its standard input closes, the command there ends, and so does it.
"""

import fcntl
import os
import select
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from infra.connection.ssh import CONNECT_SECONDS, FAST_CIPHERS, KEEPALIVE_SECONDS, SILENCE_SECONDS
from infra.inventory import Host, find_host

CIPHERS = (*FAST_CIPHERS, "chacha20-poly1305@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
NO_CONNECTION = 255
"""The exit status of `ssh` itself."""
PIPE_BYTES = 2**20


class Stream(Protocol):
    """A command's standard input and output: a process of `ssh`, or a channel of paramiko."""

    def sendall(self, data: bytes) -> object: ...

    def shutdown_write(self) -> object: ...

    def recv(self, count: int) -> bytes: ...

    def recv_stderr(self, count: int) -> bytes: ...

    def settimeout(self, seconds: float) -> object: ...


def has_client() -> bool:
    """Whether OpenSSH's client is installed here."""
    return shutil.which("ssh") is not None


@contextmanager
def client_stream(host: Host, command: Sequence[str]) -> "Iterator[ClientStream]":
    """Run a command there. What goes wrong with the connection shows as OSError at the stream, and in `lost`."""
    process = subprocess.Popen(
        [*ssh_command(host), host.host, shlex.join(command)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, start_new_session=True,
    )  # fmt: skip
    try:
        yield ClientStream(process)
    finally:
        for pipe in (process.stdin, process.stdout, process.stderr):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        process.kill()
        process.wait()


def ssh_command(host: Host) -> list[str]:
    """The client with all its options; a target and a command follow."""
    options = {
        "BatchMode": "yes",
        "StrictHostKeyChecking": "yes",
        "UserKnownHostsFile": _quoted(str(host.known_hosts.expanduser())),
        "GlobalKnownHostsFile": "none",
        "ConnectTimeout": f"{CONNECT_SECONDS:.0f}",
        "ServerAliveInterval": str(KEEPALIVE_SECONDS),
        "ServerAliveCountMax": f"{SILENCE_SECONDS / KEEPALIVE_SECONDS:.0f}",
        "ClearAllForwardings": "yes",
        "ForwardAgent": "no",
        "Compression": "no",
        "Ciphers": ",".join(CIPHERS),
        "LogLevel": "ERROR",
    }
    if host.key is not None:
        options |= {
            "IdentityFile": _quoted(str(host.key.expanduser())),
            "IdentitiesOnly": "yes",
            "IdentityAgent": "none",
        }
    if host.jump is not None:
        jump = find_host(host.jump)
        options["ProxyCommand"] = f"{_kept(shlex.join(ssh_command(jump)))} -W [%h]:%p {shlex.quote(jump.host)}"
    named = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
    return ["ssh", "-F", "none", "-T", "-p", str(host.port), *(["-l", host.user] if host.user else []), *named]


class ClientStream:
    """Fits `Stream`."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin and process.stdout and process.stderr, "it was started with pipes"
        self._process, self._seconds = process, SILENCE_SECONDS
        self._in, self._out, self._err = (pipe.fileno() for pipe in (process.stdin, process.stdout, process.stderr))
        os.set_blocking(self._in, False)
        for pipe in (self._in, self._out):
            with suppress(OSError, AttributeError):  # not on Linux, or more than this user may have
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    @property
    def lost(self) -> bool:
        """Whether the client has ended without a connection, or lost it."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(1.0) == NO_CONNECTION
        return False

    def settimeout(self, seconds: float) -> None:
        self._seconds = seconds

    def sendall(self, data: bytes) -> None:
        """Raises OSError when the other side is gone, TimeoutError when it takes nothing for a while."""
        view = memoryview(data)
        while view:
            self._wait(self._in, select.POLLOUT)
            with suppress(BlockingIOError):
                view = view[os.write(self._in, view) :]

    def shutdown_write(self) -> None:
        assert self._process.stdin is not None, "it was started with a pipe"
        self._process.stdin.close()

    def recv(self, count: int) -> bytes:
        """Nothing where the other side has ended. Raises TimeoutError."""
        return self._read(self._out, count)

    def recv_stderr(self, count: int) -> bytes:
        """What was said until its end, or until there is nothing more for the timeout."""
        said, end = b"", time.monotonic() + self._seconds
        while len(said) < count and time.monotonic() < end:
            if not (piece := self._read(self._err, count - len(said))):
                break
            said += piece
        return said

    def _read(self, descriptor: int, count: int) -> bytes:
        self._wait(descriptor, select.POLLIN)
        return os.read(descriptor, count)

    def _wait(self, descriptor: int, what: int) -> None:
        poll = select.poll()
        poll.register(descriptor, what)
        if not poll.poll(self._seconds * 1000):
            raise TimeoutError(f"nothing has moved for {self._seconds:g} s")


def _quoted(path: str) -> str:
    return f'"{_kept(path)}"'


def _kept(text: str) -> str:
    """As it is behind the client's replacement of %h and the like."""
    return text.replace("%", "%%")
