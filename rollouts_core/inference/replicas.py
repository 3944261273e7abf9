"""The list of servers. `infra.host.servers` starts, watches and restarts them.

Decision: a replica's address is new with each of its starts. Whoever knows an address therefore knows which weights are
behind it; a restarted replica cannot be taken for the one that was there before, with the weights it had.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rollouts_core.errors import EngineUnavailable

SERVERS = "servers.json"
RESTARTS = "restarts"


@dataclass(frozen=True)
class Replica:
    name: str
    url: str
    machine: str = ""
    """Another one, which `Servers.machines` tells of; empty for this one."""


@dataclass(frozen=True)
class EngineMachine:
    """A machine with servers, as it is reached from here (see `infra.host.pool`)."""

    name: str
    port: int
    """A port of the loopback here that leads to its gate. 0: it can't be reached now."""
    memory: Path
    """A directory on the machine for weights on their way."""
    address: str = ""
    """The machine's address on a network that it shares with this one."""
    reaches: tuple[str, ...] = ()
    """The names of machines that it passes weights on to."""


@dataclass(frozen=True)
class Servers:
    """The servers that answer now."""

    replicas: tuple[Replica, ...]
    router: str | None = None
    """The router's address, if several servers are behind one."""
    memory: Path | None = None
    """A directory in memory, for weights on their way; who made the servers removes it."""
    machines: Mapping[str, EngineMachine] = field(default_factory=dict)
    """Other machines that have servers, by name."""


class Fleet(Protocol):
    def ready(self) -> Servers:
        """The replicas that answer. Raises `EngineUnavailable` with the reason when there will be none any more."""

    def restart(self, replica: Replica, reason: str) -> None:
        """Ask for a new start of a replica that is not to be trusted."""


class FixedServers:
    """Servers that somebody else looks after; they are taken to be there."""

    def __init__(self, urls: Sequence[str], router: str | None = None, memory: Path | None = None) -> None:
        self._servers = Servers(tuple(Replica(url, url) for url in urls), router, memory)

    def ready(self) -> Servers:
        return self._servers

    def restart(self, replica: Replica, reason: str) -> None:
        """Do nothing: nobody watches these servers. The next request tries the replica again."""


class SupervisedServers:
    """Servers of a service job on this machine, as its directory tells of them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: tuple[int, Servers] | None = None

    def ready(self) -> Servers:
        with suppress(OSError):
            os.utime(self._directory / "attended")
        file = self._directory / SERVERS
        try:
            stamp = file.stat().st_mtime_ns
            if self._read is None or self._read[0] != stamp:
                self._read = (stamp, _servers(json.loads(file.read_text())))
        except FileNotFoundError:
            raise EngineUnavailable(f"there are no servers in {self._directory}: {self._ending()}") from None
        if ending := self._ending():
            raise EngineUnavailable(f"the servers of {self._directory.name} have ended: {ending}")
        return self._read[1]

    def restart(self, replica: Replica, reason: str) -> None:
        """A request the supervisor takes up within a second."""
        (self._directory / RESTARTS).mkdir(exist_ok=True)
        (self._directory / RESTARTS / replica.name).write_text(json.dumps({"url": replica.url, "reason": reason}))

    def _ending(self) -> str:
        try:
            said = json.loads((self._directory / "failure.json").read_text())
            return str(said["message"])
        except (OSError, ValueError, KeyError):
            pass
        try:
            return str(json.loads((self._directory / "status.json").read_text())["reason"])
        except (OSError, ValueError, KeyError):
            return ""


def _servers(said: dict[str, Any]) -> Servers:
    ready = [entry for entry in said["replicas"] if entry["state"] == "ready"]
    machines = [entry for entry in said.get("machines", []) if entry["memory"]]
    return Servers(
        tuple(Replica(entry["name"], entry["url"], entry.get("machine", "")) for entry in ready),
        said.get("router"),
        Path(said["memory"]) if said.get("memory") else None,
        {
            entry["name"]: EngineMachine(
                entry["name"], entry["port"], Path(entry["memory"]), entry.get("address", ""), tuple(entry["reaches"])
            )
            for entry in machines
        },
    )
