"""SSH connections, by paramiko.

Decision: a host key that is unknown or has changed is refused, and the error gives the one line that would accept the
key that was shown. No agent is forwarded.

Decision: errors that a person must mend (keys, names, rights) are `BadInput`; errors that may pass (a network that is
away, a host that boots) are `Unreachable`. Only the second are retried.
"""

import base64
import getpass
import shlex
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256

import paramiko

from infra.errors import Unreachable
from infra.host.ssh_client import CONNECT_SECONDS, FAST_CIPHERS, KEEPALIVE_SECONDS, SILENCE_SECONDS, server_name
from infra.inventory import Host, find_host
from rollouts_core.errors import BadInput

WINDOW = 2**24
PACKET = 2**18
"""The bytes that the other side may send in a packet. With the usual 32 KiB, receiving is four times slower."""
BYTES_PER_KEY = 2**35
"""AES-GCM is good for twice as much; paramiko's own limit renews keys every half gigabyte, and stalls doing so."""


@dataclass
class Connection:
    """A connection, with those it goes through. Whoever has made one closes it, opened or not."""

    name: str
    client: paramiko.SSHClient = field(default_factory=paramiko.SSHClient)
    through: "Connection | None" = None
    socket: "socket.socket | paramiko.Channel | None" = None

    def open(self, host: Host) -> "Connection":
        """Raises `BadInput` for what a person must mend, `Unreachable` for what may pass."""
        if host.jump:
            self.through = Connection(host.jump)
            self.through.open(find_host(host.jump))
        try:
            _connect(self, host)
        except BaseException as error:
            raise _explained(self.name, host, error) from None
        self.transport.set_keepalive(KEEPALIVE_SECONDS)
        return self

    def is_alive(self) -> bool:
        transport = self.client.get_transport()
        return transport is not None and transport.is_active()

    @property
    def transport(self) -> paramiko.Transport:
        transport = self.client.get_transport()
        if transport is None or not transport.is_active():
            raise Unreachable(f"{self.name}: the connection is closed")
        return transport

    def run(self, command: list[str]) -> paramiko.Channel:
        """A channel to a command there; its standard input and output. Raises `Unreachable`."""
        try:
            channel = self.transport.open_session(WINDOW, PACKET, timeout=CONNECT_SECONDS)
            channel.settimeout(SILENCE_SECONDS)
            channel.exec_command(shlex.join(command))
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise Unreachable(f"{self.name}: {_text(error)}") from None
        return channel

    def close(self) -> None:
        with suppress(Exception):  # the connection may be dead
            self.client.close()
        if self.socket is not None:
            self.socket.close()
        if self.through is not None:
            self.through.close()


def _connect(connection: Connection, host: Host) -> None:
    name, client = connection.name, connection.client
    known_hosts = host.known_hosts.expanduser()
    if known_hosts.exists():
        client.load_host_keys(str(known_hosts))
    client.set_missing_host_key_policy(_Refuse(name, host))
    key = host.key.expanduser() if host.key else None
    if key is not None and not key.is_file():
        raise BadInput(f"{name}: there is no private key {key}")
    _open_socket(connection, host)
    client.connect(
        host.host, host.port, host.user or getpass.getuser(),
        key_filename=str(key) if key else None, look_for_keys=key is None, allow_agent=key is None,
        timeout=CONNECT_SECONDS, banner_timeout=CONNECT_SECONDS, auth_timeout=CONNECT_SECONDS,
        sock=connection.socket, transport_factory=_transport,
    )  # fmt: skip


def _open_socket(connection: Connection, host: Host) -> None:
    target = (host.host, host.port)
    if connection.through is not None:
        transport, source = connection.through.transport, ("127.0.0.1", 0)
        connection.socket = transport.open_channel("direct-tcpip", target, source, timeout=CONNECT_SECONDS)
        return
    connection.socket = socket.create_connection(target, CONNECT_SECONDS)
    if sys.platform == "linux":
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE_SECONDS * 1000))


def _transport(sock: socket.socket, **options: object) -> paramiko.Transport:
    """A transport that prefers ciphers with hardware support, and has a window that is large enough for fast links."""
    transport = paramiko.Transport(sock, default_window_size=WINDOW, **options)
    security = transport.get_security_options()
    fast = [cipher for cipher in FAST_CIPHERS if cipher in security.ciphers]
    security.ciphers = (*fast, *(cipher for cipher in security.ciphers if cipher not in fast))
    transport.packetizer.REKEY_BYTES = BYTES_PER_KEY
    return transport


class _Refuse:
    """The policy that paramiko asks about host keys that are not in the known-hosts file: refuse."""

    def __init__(self, name: str, host: Host) -> None:
        self._name, self._host = name, host

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        raise BadInput(_key_problem(self._name, self._host, key, "is unknown", ""))


def _explained(name: str, host: Host, error: BaseException) -> BaseException:
    where = f"{name} ({host.host}:{host.port})"
    user = host.user or getpass.getuser()
    match error:
        case BadInput() | Unreachable() | KeyboardInterrupt():
            return error
        case paramiko.BadHostKeyException():
            file = shlex.quote(str(host.known_hosts.expanduser()))
            forget = f"ssh-keygen -f {file} -R '{server_name(host.host, host.port)}' && "
            return BadInput(_key_problem(name, host, error.key, "HAS CHANGED", forget))
        case paramiko.PasswordRequiredException():
            return BadInput(f"{where}: the private key {host.key or 'in ~/.ssh'} has a passphrase: ssh-add it")
        case paramiko.AuthenticationException():
            key = host.key or "from your SSH agent or ~/.ssh"
            return BadInput(
                f"{where} refuses {user} with the key {key}: put its public half into ~/.ssh/authorized_keys there, "
                f"as `ssh-copy-id -p {host.port} {user}@{host.host}` does"
            )
        case socket.gaierror():
            return Unreachable(f"{where}: no host of that name is known ({error.strerror})")
        case paramiko.SSHException() | OSError() | EOFError():
            return Unreachable(f"{where}: {_text(error)}")
    return error


def _key_problem(name: str, host: Host, key: paramiko.PKey, what: str, forget: str) -> str:
    digest = base64.b64encode(sha256(key.asbytes()).digest()).decode().rstrip("=")
    line = f"{server_name(host.host, host.port)} {key.get_name()} {key.get_base64()}"
    file = shlex.quote(str(host.known_hosts.expanduser()))
    return (
        f"{name} ({host.host}:{host.port}): its host key {key.get_name()} SHA256:{digest} {what}, so it is refused. "
        f"Compare it with the host's own (`ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub` there); if it is right, accept "
        f"it with\n      {forget}echo '{line}' >> {file}"
    )


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
