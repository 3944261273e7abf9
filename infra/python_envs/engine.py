"""The Python environment of inference servers, which is built once on the machine that runs them.

Decision: servers do not share the trainer's environment, because the pins of the two do not agree. On a host with GPUs
the engine's ordinary package and its dependencies are installed. Without GPUs it is a complete list of pins, installed
without dependencies (the packages' metadata require CUDA's), with two small modules in the place of those that only a
GPU build has.
"""

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from infra.jobs.session import MachineSession
from infra.machines.machine import Job
from infra.machines.ssh_machine import SSHMachine
from infra.python_envs.build import BUILD_SECONDS, followed_build
from rollouts_core.store.keys import key_of


@dataclass(frozen=True)
class Packages:
    """The packages of an engine's environment."""

    requirements: tuple[str, ...]
    check: str
    """Python that imports what servers need and prints JSON."""
    no_deps: bool = False
    files: dict[str, str] = field(default_factory=dict)


def engine_python(packages: Packages, session: MachineSession) -> Iterator[str | Path]:
    """Yields the installer's lines, then the interpreter that has the packages.

    Raises `JobFailed` with the installer's last lines.
    """
    place = _places(session) / key_of(_described(packages, session))[:16]
    yield from build(session, packages, place)
    yield place / "bin" / "python"


def built_here(packages: Packages) -> Path | None:
    """The interpreter that an earlier run on this machine built for the packages."""
    described = _described_for(packages, platform.python_version(), platform.platform())
    python = _local_place() / key_of(described)[:16] / "bin" / "python"
    return python if python.exists() else None


def build(session: MachineSession, packages: Packages, place: Path) -> Iterator[str]:
    """Build the environment unless it is there; yields the installer's lines."""
    machine = session.machine
    spec = {
        "place": str(place),
        "requirements": list(packages.requirements),
        "wheels": None,
        "check": packages.check,
        "no_deps": packages.no_deps,
        "files": packages.files,
    }
    job = Job(
        f"environment-{place.name}",
        tuple(host_command(session, "environment")),
        spec,
        BUILD_SECONDS,
        BUILD_SECONDS,
        BUILD_SECONDS,
    )
    yield from followed_build(machine, job, session, "serve", "the servers' environment")


def host_command(session: MachineSession, part: str) -> list[str]:
    """Runs a part of the agent on the session's machine, in its job's directory."""
    if isinstance(session.machine, SSHMachine):
        return session.machine.remote.command(part, "{directory}")
    return [sys.executable, "-m", f"infra.host.{part}", "{directory}"]


def _places(session: MachineSession) -> Path:
    if isinstance(session.machine, SSHMachine):
        return Path(session.machine.remote.work) / "environments"
    return _local_place()


def _local_place() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollouts" / "environments"


def _described(packages: Packages, session: MachineSession) -> dict[str, object]:
    if isinstance(session.machine, SSHMachine):
        facts = session.machine.remote.call("facts")
        return _described_for(packages, facts["python"], facts["platform"])
    return _described_for(packages, platform.python_version(), platform.platform())


def _described_for(packages: Packages, python: str, there: str) -> dict[str, object]:
    pins = {"requirements": list(packages.requirements), "no_deps": packages.no_deps, "files": packages.files}
    return {**pins, "python": python, "platform": there}
