"""What inference servers are installed from: an environment of their own, built once on the machine that runs them.

Decision: servers do not share the trainer's environment: their pins and its pins do not agree. On a host with GPUs it
is the ordinary package with what that asks for. On one without, it is a complete list of pins, installed without asking
for more (the packages' own metadata insist on CUDA's), with two small modules in the place of what only a GPU build
has.
"""

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from infra.host.facts import gpus
from infra.jobs.session import MachineSession
from infra.machines.machine import Job
from infra.machines.ssh_machine import SSHMachine
from infra.python_envs.build import BUILD_SECONDS, followed_build
from rollouts_core.config import EngineConfig
from rollouts_core.store.keys import key_of

STANDINS = Path(__file__).parent / "standins"
ON_GPU = {"sglang": ("sglang==0.5.23", "sglang-router==0.3.2"), "vllm": ("vllm==0.32.0",)}
CHECKS = {"sglang": "import sglang, torch, transformers; print('{}')", "vllm": "import vllm, torch; print('{}')"}


@dataclass(frozen=True)
class Packages:
    requirements: tuple[str, ...]
    no_deps: bool = False
    files: dict[str, str] = field(default_factory=dict)


def packages_of(kind: str, on_gpu: bool) -> Packages:
    """What a server of this kind is installed from."""
    if on_gpu:
        return Packages(ON_GPU[kind])
    pins = tuple((STANDINS / f"{kind}-cpu.txt").read_text().split())
    modules = ("sitecustomize.py", "sgl_kernel.py") if kind == "sglang" else ("sitecustomize.py",)
    return Packages(pins, True, {name: (STANDINS / name).read_text() for name in modules})


def leased_gpus(session: MachineSession) -> int:
    """How many GPUs the run's jobs see there."""
    if session.settings.device == "cpu":
        return 0
    return len(session.machine.gpus) if isinstance(session.machine, SSHMachine) else len(gpus())


def engine_python(config: EngineConfig, session: MachineSession) -> Iterator[str | Path]:
    """Yields the installer's lines, then the interpreter that has the server's package.

    Raises `JobFailed` with the installer's last lines.
    """
    if config.python is not None:
        yield Path(config.python)
        return
    packages = packages_of(config.kind, leased_gpus(session) > 0)
    place = _places(session) / key_of(_described(packages, session))[:16]
    python = place / "bin" / "python"
    yield from build(session, packages, place, CHECKS[config.kind])
    yield python


def build(session: MachineSession, packages: Packages, place: Path, check: str) -> Iterator[str]:
    """Build the environment unless it is there; yields the installer's lines."""
    machine = session.machine
    spec = {
        "place": str(place),
        "requirements": list(packages.requirements),
        "wheels": None,
        "check": check,
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
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollouts" / "environments"


def _described(packages: Packages, session: MachineSession) -> dict[str, object]:
    if isinstance(session.machine, SSHMachine):
        facts = session.machine.remote.call("facts")
        python, there = facts["python"], facts["platform"]
    else:
        python, there = platform.python_version(), platform.platform()
    pins = {"requirements": list(packages.requirements), "no_deps": packages.no_deps, "files": packages.files}
    return {**pins, "python": python, "platform": there}
