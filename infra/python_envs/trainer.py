"""The Python environment of jobs, recorded as an artifact: its interpreter, its libraries, and that they can be
imported.

Decision: a host's environment is made of the versions that are installed here, unless its table in the inventory names
other pins: trainer and orchestrator then agree, and a run there gives the bits of a run here. Local builds (`+cpu`) are
left out of the pins, so that a GPU host takes its own.

Decision: on a host, an environment is built once for its pins, Python and platform, by a job like any other. So the
build survives the orchestrator, two runs share it, and its log can be followed.
"""

import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from infra.errors import MachineError
from infra.host.environment import VERSIONS
from infra.host.trees import Entry, tree_name
from infra.jobs.session import MachineSession
from infra.machines.machine import Job, literal
from infra.machines.ssh_machine import SSHMachine
from infra.python_envs.build import BUILD_SECONDS, followed_build
from infra.transfer.library import tree_of
from infra.transfer.sync import send_tree
from rollouts_core.errors import BadInput
from rollouts_core.store.fingerprint import installed_versions
from rollouts_core.store.keys import key_of
from rollouts_core.store.maker import making
from rollouts_core.store.manifest import ArtifactId, Provenance
from rollouts_core.store.store import Store

LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "pyarrow", "numpy", "pydantic", "datasets", "fsspec")
CHECK = (
    "import json, pyarrow, pydantic, safetensors, tokenizers, torch, transformers; "
    "print(json.dumps({'cuda': torch.cuda.is_available(), 'threads': torch.get_num_threads()}))"
)
DEADLINE = 300.0


def environment_artifact() -> ArtifactId:
    """The artifact that says this environment works. Its key follows from interpreter, platform and versions."""
    return ArtifactId("bootstrap", key_of(_described_here()))


def check_environment(store: Store) -> None:
    """Import what jobs import, once, and record it. Raises `MachineError` with the import's last lines."""
    began = time.perf_counter()
    try:
        command = [sys.executable, "-c", CHECK]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True)
    except subprocess.CalledProcessError as error:
        lines = "\n".join(error.stderr.splitlines()[-5:])
        raise MachineError(f"the environment does not work; install with `make install`.\n{lines}") from None
    described = _described_here()
    _record(store, environment_artifact(), described, json.loads(done.stdout), began)


def prepare_environment(machine: SSHMachine, session: MachineSession) -> Iterator[str | ArtifactId]:
    """Send the library, find or build the host's environment; yields the installer's lines, then the artifact.

    Raises `BadInput` when a file of pins or wheels is missing, `MachineError` with the installer's last lines.
    """
    began, store = time.perf_counter(), session.store
    machine.ship_library()
    host = machine.remote.host
    if host.environment == "own" and host.slurm and host.slurm.container:
        yield from _own_in_container(machine, session, host.slurm.container, began)
        return
    if host.environment == "own":
        yield _own(machine, store, began)
        return
    pins, facts, wheels = _pins(machine), machine.remote.call("facts"), _wheels(machine)
    described = {
        "pins": pins,
        "python": facts["python"],
        "platform": facts["platform"],
        "wheels": tree_name(wheels) if wheels else None,
    }
    if host.slurm and host.slurm.container:
        described["container"] = host.slurm.container
    artifact = ArtifactId("bootstrap", key_of(described))
    place = f"{machine.remote.work}/environments/{artifact.key[:16]}"
    machine.python = f"{place}/bin/python"
    found = machine.remote.call("built", key=artifact.key[:16])
    if found is None:
        yield from _build(machine, session, place, pins, wheels)
        found = machine.remote.call("built", key=artifact.key[:16])
    if found is None:
        raise MachineError(f"{machine.name}: its environment was built and is gone")
    _record(store, artifact, described, found, began)
    yield artifact


def _own(machine: SSHMachine, store: Store, began: float) -> ArtifactId:
    """The host's own Python as the environment. Its imports are checked once per set of versions."""
    machine.python = machine.remote.host.python
    versions = machine.remote.call("versions", DEADLINE, python=machine.python)
    described = {"machine": machine.name, "interpreter": machine.python, "versions": versions}
    artifact = ArtifactId("bootstrap", key_of(described))
    if not store.has(artifact):
        imports = machine.remote.call("imports", DEADLINE, python=machine.python, check=CHECK)
        _record(store, artifact, described, imports, began)
    return artifact


def _own_in_container(
    machine: SSHMachine, session: MachineSession, container: str, began: float
) -> Iterator[str | ArtifactId]:
    """The Python of a container as the environment. A job in it lists its packages, once for each container."""
    machine.python = machine.remote.host.python
    described = {"machine": machine.name, "interpreter": machine.python, "container": container}
    artifact = ArtifactId("bootstrap", key_of(described))
    if not session.store.has(artifact):
        command = (machine.python, "-c", literal(f"{VERSIONS}\n{CHECK}"))
        job = Job(f"environment-{artifact.key[:16]}", command, {}, DEADLINE, DEADLINE, DEADLINE)
        told = []
        for line in followed_build(machine, job, session, "bootstrap", "the environment of its container"):
            if line.startswith("{"):
                told.append(json.loads(line))
            else:
                yield line
        *_, versions, imports = told
        _record(session.store, artifact, {**described, "versions": versions}, imports, began)
    yield artifact


def installed_pins() -> list[str]:
    """`name==version` of all that jobs need, directly or not, as installed here."""
    pins: dict[str, str] = {}
    pending: list[tuple[str, str]] = [(name, "") for name in LIBRARIES]
    seen = set(pending)
    while pending:
        name, extra = pending.pop()
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        pins[_normal(name)] = found.version.partition("+")[0]
        required = [Requirement(text) for text in found.requires or ()]
        wanted = [need for need in required if need.marker is None or need.marker.evaluate({"extra": extra})]
        reached = {(_normal(need.name), extra) for need in wanted for extra in ("", *need.extras)} - seen
        seen |= reached
        pending += reached
    return [f"{name}=={version}" for name, version in sorted(pins.items())]


def _build(
    machine: SSHMachine, session: MachineSession, place: str, pins: list[str], wheels: Sequence[Entry]
) -> Iterator[str]:
    directory = machine.remote.host.wheels
    spec = {"place": place, "requirements": pins, "wheels": None, "check": CHECK}
    if directory is not None:
        name = tree_name(wheels)
        if send_tree(machine.remote, "wheels", name, directory.expanduser(), wheels):
            yield f"sent {len(wheels)} wheels to {machine.name}"
        spec["wheels"] = f"{machine.remote.work}/wheels/{name}"
    command = tuple(machine.remote.command("environment", "{directory}"))
    job = Job(f"environment-{Path(place).name}", command, spec, BUILD_SECONDS, BUILD_SECONDS, BUILD_SECONDS)
    yield from followed_build(machine, job, session, "bootstrap", "its environment")


def _pins(machine: SSHMachine) -> list[str]:
    file = machine.remote.host.requirements
    if file is None:
        return installed_pins()
    try:
        lines = [line.partition("#")[0].strip() for line in file.expanduser().read_text().splitlines()]
    except OSError as error:
        raise BadInput(f"{machine.name}: requirements {file}: {error.strerror}") from None
    return [line for line in lines if line]


def _wheels(machine: SSHMachine) -> list[Entry]:
    """The wheels that the host is to install from; none where it uses its network."""
    directory = machine.remote.host.wheels
    if directory is None:
        return []
    root = directory.expanduser()
    files = sorted(root.glob("*.whl"))
    if not files:
        raise BadInput(f"{machine.name}: wheels {root}: there is no wheel in that directory")
    return tree_of(root, files)


def _record(
    store: Store, artifact: ArtifactId, described: Mapping[str, Any], found: Mapping[str, Any], began: float
) -> None:
    started = datetime.now(UTC)
    with making(store, artifact, DEADLINE) as place:
        if place is None:
            return
        (place.out / "environment.json").write_text(json.dumps({**described, **found}))
        place.publish(
            Provenance(
                version=1,
                spec=dict(described),
                inputs={},
                external={},
                code={},
                git_commit=None,
                libraries=installed_versions(LIBRARIES),
                host={"platform": platform.platform(), "python": platform.python_version()},
                started_at=started.isoformat(timespec="seconds"),
                seconds=round(time.perf_counter() - began, 3),
                summary={},
            )
        )


def _described_here() -> dict[str, object]:
    return {
        "python": platform.python_version(),
        "interpreter": sys.executable,
        "platform": platform.platform(),
        "libraries": installed_versions(LIBRARIES),
    }


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
