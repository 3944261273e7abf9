"""A command on a host through OpenSSH's own client, if it is installed; large transfers use it.

Decision: Python encrypts slower than OpenSSH, and uses cores that the receiving side may need. So calls go through
paramiko, which keeps one connection open, and large streams go through a process of `ssh` each. It gets the host keys
and the private key of the inventory, and reads no configuration of its own: so both refuse the same hosts.

The process ends with the process that opened it: its standard input closes, the command on the host ends, and then it
ends.
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

from infra.host.ssh_client import SILENCE_SECONDS, client_command, kept
from infra.inventory import Host, find_host

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
    further = {"ClearAllForwardings": "yes"}
    if host.jump is not None:
        jump = find_host(host.jump)
        further["ProxyCommand"] = f"{kept(shlex.join(ssh_command(jump)))} -W [%h]:%p {shlex.quote(jump.host)}"
    key = host.key.expanduser() if host.key else None
    return client_command(host.port, host.user, host.known_hosts.expanduser(), key, further)


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
        """At most `count` bytes; empty if the other side has ended. Raises TimeoutError."""
        return self._read(self._out, count)

    def recv_stderr(self, count: int) -> bytes:
        """What the other side wrote to standard error, until its end or until nothing comes for the timeout."""
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
