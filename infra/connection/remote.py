"""A host that is reached over SSH: requests to its agent, over a connection that is made again when it breaks.

Decision: a call may be made twice, so a lost connection is only a delay. A call is repeated until the host answers or
`patience` is over. A caller that has other work meanwhile uses no patience and gets `Unreachable`.
"""

import contextlib
import getpass
import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import paramiko

from infra.connection.archive import agent_archive, load_command
from infra.connection.loader import MARK
from infra.connection.openssh import Stream, client_stream, has_client
from infra.connection.ssh import PACKET, WINDOW, Connection
from infra.errors import MachineError, Unreachable
from infra.host.agent import LENGTH, MAX_REQUEST
from infra.host.ssh_client import CONNECT_SECONDS
from infra.inventory import Host
from rollouts_core.errors import BadInput

FIRST_PATIENCE = 20.0
ANSWER_SECONDS = 30.0
BACKOFF = (0.2, 1.0, 2.0, 5.0)
MAX_GREETING = 65536
NOT_FOUND = 127
DISK_FULL = "28"
SAID = 200
"""Bytes of an answer that are quoted in an error."""

logger = logging.getLogger("rollouts.machines")


class Remote:
    """A host that is reached over SSH. Safe to use from several threads; they take turns."""

    def __init__(self, name: str, host: Host, patience: float) -> None:
        """`patience`: seconds that a host may not answer. Does not connect yet."""
        self.name, self.host = name, host
        self.work = ""
        """The host's work directory, an absolute path; known after its first answer."""
        self._patience = patience
        self._connection: Connection | None = None
        self._channel: paramiko.Channel | None = None
        self._lost = False
        """Whether OpenSSH's client lost the last stream."""
        self._turn = threading.RLock()

    def open(self) -> "Remote":
        """Connect. Raises `BadInput` for what a person must mend, `Unreachable` when nothing answers for a while."""
        self.call("artifacts", patience=min(FIRST_PATIENCE, self._patience), names=[])
        return self

    def call(
        self, what: str, /, deadline: float = ANSWER_SECONDS, patience: float | None = None, **arguments: Any
    ) -> Any:
        """The answer of the host's agent. Raises `MachineError` when it can't do it, `Unreachable` as said above."""
        end = time.monotonic() + (self._patience if patience is None else patience)
        failures = 0
        while True:
            try:
                answer = self._ask(what, arguments, deadline)
                if failures:
                    logger.info("%s answers again", self.name)
                return answer
            except Unreachable as error:
                if time.monotonic() >= end:
                    raise
                if not failures:
                    logger.warning("%s; what runs there runs on, and it is tried again", error)
            time.sleep(BACKOFF[min(failures, len(BACKOFF) - 1)])
            failures += 1

    @property
    def user(self) -> str:
        """The user on the host."""
        return self.host.user or getpass.getuser()

    def host_key(self) -> str:
        """Kind and key of the host, as known-hosts files have them. Raises `Unreachable`."""
        key = self._shared().transport.get_remote_server_key()
        return f"{key.get_name()} {key.get_base64()}"

    @contextlib.contextmanager
    def channel(self, *arguments: str, alone: bool) -> Iterator[Stream]:
        """Open a stream to a part of the agent, run as its own command; `alone`: on a connection of its own.

        A stream on its own connection goes through OpenSSH's client, if that is installed. After the client has lost a
        stream, the next one goes through paramiko. Raises `Unreachable`.
        """
        if alone and has_client() and not self._lost:
            with client_stream(self.host, self.command(*arguments)) as stream:
                try:
                    yield stream
                except (Unreachable, MachineError):
                    self._lost = stream.lost
                    raise
            return
        if alone:
            self._lost = False
            with contextlib.closing(Connection(self.name)) as connection:
                yield connection.open(self.host).run(self.command(*arguments))
            return
        with contextlib.closing(self._shared().run(self.command(*arguments))) as channel:
            yield channel

    def open_port(self, port: int) -> paramiko.Channel:
        """A channel to a port of the host's loopback. Raises `Unreachable`, `MachineError` when nothing listens."""
        target = ("127.0.0.1", port)
        try:
            return self._shared().transport.open_channel(
                "direct-tcpip", target, target, WINDOW, PACKET, CONNECT_SECONDS
            )
        except paramiko.ChannelException as error:
            raise MachineError(f"{self.name}: nothing answers on port {port}: {error}") from None
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise Unreachable(f"{self.name}: {str(error) or type(error).__name__}") from None

    def _shared(self) -> Connection:
        """The connection that calls use, made anew where it is known to be dead."""
        with self._turn:
            if self._connection is not None and not self._connection.is_alive():
                self.close()
            if self._channel is None:
                self._channel = self._connect()
            assert self._connection is not None, "connecting makes one"
            return self._connection

    def command(self, *arguments: str) -> list[str]:
        """A command line that runs a part of the agent there."""
        return [self.host.python, f"{self.work}/agent/{agent_archive()[0]}.zip", *arguments]

    def close(self) -> None:
        """Close the connections, also those that an interrupted `close` left open. A later call connects again."""
        with self._turn:
            self._channel = None
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def _ask(self, what: str, arguments: dict[str, Any], deadline: float) -> Any:
        with self._turn:
            try:
                channel = self._channel or self._connect()
                channel.settimeout(deadline)
                data = json.dumps({"call": what, "arguments": arguments}).encode()
                channel.sendall(LENGTH.pack(len(data)) + data)
                (length,) = LENGTH.unpack(_exactly(channel, LENGTH.size))
                if length > MAX_REQUEST:
                    raise MachineError(
                        f"{self.name}: its answer has {length:,} bytes; at most {MAX_REQUEST:,} are read"
                    )
                content = _exactly(channel, length)
            except (OSError, EOFError, paramiko.SSHException, struct.error) as error:
                self.close()
                raise Unreachable(f"{self.name} does not answer ({str(error) or type(error).__name__})") from None
            except BaseException:  # also for an interrupt: otherwise this answer would be read as that of the next call
                self.close()
                raise
        return self._value_in(content)

    def _value_in(self, content: bytes) -> Any:
        with contextlib.suppress(ValueError, RecursionError):
            match json.loads(content):
                case {"error": _, "message": str()} as answer:
                    raise self.failure(answer)
                case {"value": value}:
                    return value
        self.close()
        raise MachineError(f"{self.name}: its agent sent something that is not an answer: {content[:SAID]!r}")

    def failure(self, answer: dict[str, Any]) -> Exception:
        if answer["error"] == "disk full":
            return BadInput(f"{self.name}: no space left on its disk, at {self.work}: free some, then run again")
        return MachineError(f"{self.name}: {answer['message']}")

    def _connect(self) -> paramiko.Channel:
        self.close()
        self._connection = Connection(self.name)
        channel = self._connection.open(self.host).run(load_command(self.host.python, self.host.work))
        channel.settimeout(CONNECT_SECONDS * 2)
        words = self._greeting(channel)
        if words == ["send"]:
            channel.sendall(agent_archive()[1])
            words = self._greeting(channel)
        match words:
            case ["ready", *work]:
                self.work, self._channel = " ".join(work), channel
                return channel
        self.close()
        match words:
            case ["old", version]:
                raise BadInput(f"{self.name}: its {self.host.python} is Python {version}, and 3.11 or later is needed")
            case ["unusable", number, *_] if number == DISK_FULL:
                place = self.host.work
                raise BadInput(f"{self.name}: no space left on its disk, at {place}: free some, then run again")
            case ["unusable", _, *reason]:
                why = " ".join(reason)
                raise BadInput(f"{self.name}: its work directory can't be used: {why}. Name another with `work`")
        raise MachineError(f"{self.name}: it sent an unexpected answer: {' '.join(words)!r}")

    def _greeting(self, channel: paramiko.Channel) -> list[str]:
        """The next line that is meant for us; login shells may print others."""
        line = b""
        for _ in range(MAX_GREETING):
            letter = channel.recv(1)
            if not letter:
                raise self._no_greeting(channel)
            line += letter
            if letter == b"\n":
                words: list[str] = line.decode(errors="replace").split()
                if words[:1] == [MARK]:
                    return words[1:]
                line = b""
        raise MachineError(f"{self.name}: its login shell prints too much before the agent starts")

    def _no_greeting(self, channel: paramiko.Channel) -> Exception:
        if not channel.status_event.wait(CONNECT_SECONDS):
            return Unreachable(f"{self.name} closed the connection")
        said = b""
        with contextlib.suppress(socket.timeout):
            said = channel.recv_stderr(4096)
        if channel.exit_status == -1:
            return Unreachable(f"{self.name} closed the connection")
        if channel.exit_status == NOT_FOUND:
            return BadInput(
                f"{self.name}: there is no {self.host.python} there: install Python 3.11 or later, or say where it is "
                "with `python`"
            )
        lines = said.decode(errors="replace").strip() or f"exit status {channel.exit_status}"
        return MachineError(f"{self.name}: its agent does not start: {lines}")


def _exactly(channel: paramiko.Channel, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = channel.recv(min(count - len(data), 2**20))
        if not piece:
            raise EOFError("the connection ended")
        data += piece
    return bytes(data)
