"""A link to a machine with servers: a process of OpenSSH's client that leads from a port here to its gate. Standard
library only.

The key is made here, for one job, and never leaves the job's directory.
"""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from infra.host.files import add_record
from infra.host.ssh_client import client_command, server_name
from infra.host.system import end_with_parent, free_port

CONNECT_SECONDS = 15.0
KEY = "key"
LINE = 2**20
"""The longest that is said through a gate, in bytes."""


@dataclass(frozen=True)
class Machine:
    """How a machine with servers is reached from here."""

    name: str
    host: str
    port: int
    user: str
    host_key: str
    """Kind and key, as known-hosts files have them."""
    gate: int
    """The port of its loopback that everything goes through."""


@dataclass
class Linked:
    """A link that is being made, or stands."""

    port: int
    """Here; who connects before it stands is refused."""
    said: str = ""
    """The last that the client has said, once the link has ended."""


def machines_in(file: Path) -> set[Machine]:
    """The machines that a job was told of; none before that."""
    try:
        return {Machine(**entry) for entry in json.loads(file.read_text())}
    except FileNotFoundError:
        return set()


def make_key(directory: Path) -> str:
    """A key pair of a directory's own, unless it is there; returns the public half."""
    key = directory / KEY
    if not key.exists():
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "rollouts", "-f", str(key)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return key.with_suffix(".pub").read_text().strip()


def tell_key(directory: Path) -> None:
    """The key of this job, whose public half is told in its metrics."""
    add_record(directory / "metrics.jsonl", {"key": make_key(directory)})


@asynccontextmanager
async def link(machine: Machine, directory: Path) -> AsyncIterator[Linked]:
    """A link that ends with the block. `directory` has the key."""
    linked = Linked(free_port())
    known_hosts = directory / f"known-{machine.name}"
    known_hosts.write_text(f"{server_name(machine.host, machine.port)} {machine.host_key}\n")
    forward = {"ExitOnForwardFailure": "yes", "LocalForward": f"127.0.0.1:{linked.port} 127.0.0.1:{machine.gate}"}
    command = client_command(machine.port, machine.user, known_hosts, directory / KEY, forward)
    process = await asyncio.create_subprocess_exec(
        *command, "-N", machine.host,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        preexec_fn=end_with_parent,
    )  # fmt: skip
    words = asyncio.create_task(_words(process))
    try:
        yield linked
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        linked.said = await words


async def entered(port: int, limit: int = LINE) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection through a link, once it stands. Raises TimeoutError where it does not come to that."""
    async with asyncio.timeout(CONNECT_SECONDS):
        while True:
            with suppress(ConnectionRefusedError):
                return await asyncio.open_connection("127.0.0.1", port, limit=limit)
            await asyncio.sleep(0.05)


async def _words(process: asyncio.subprocess.Process) -> str:
    """The last of what the client says, once it has ended."""
    assert process.stderr is not None, "started with a pipe"
    said = (await process.stderr.read()).decode(errors="replace").strip()
    return said.splitlines()[-1] if said else ""
