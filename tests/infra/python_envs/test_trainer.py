"""Environments of hosts: built once from wheels, by pip and by uv, found again, and explained when they fail."""

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.connection.remote import Remote
from infra.errors import JobFailed
from infra.inventory import find_host
from infra.jobs.session import MachineSession
from infra.machines.ssh_machine import SSHMachine
from infra.python_envs import trainer as environment
from infra.python_envs.trainer import installed_pins, prepare_environment
from rollouts_core.config import MachineConfig
from rollouts_core.errors import BadInput
from rollouts_core.observe.runs import RunLog
from rollouts_core.store.local import LocalStore
from rollouts_core.store.manifest import ArtifactId
from tests.cluster import Cluster
from tests.conftest import until
from tests.hosts import HostMachine, write_inventory

Hosts = tuple[HostMachine, HostMachine]


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one small wheel, which stands for all that jobs need."""
    monkeypatch.setattr(environment, "CHECK", "import tiny; print('{\"cuda\": false}')")
    directory = tmp_path / "wheels"
    directory.mkdir()
    files = {
        "tiny.py": b"VALUE = 1\n",
        "tiny-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        "tiny-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},sha256={_digest(content)},{len(content)}\n" for name, content in files.items())
    with zipfile.ZipFile(directory / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
        wheel.writestr("tiny-1.0.dist-info/RECORD", record + "tiny-1.0.dist-info/RECORD,,\n")
    (tmp_path / "pins.txt").write_text("tiny==1.0  # all there is\n")
    return directory


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


@pytest.fixture
def reach(hosts: Hosts, tmp_path: Path, wheels: Path, run_log: RunLog) -> Iterator[Callable[..., MachineSession]]:
    made: list[SSHMachine] = []

    def reach(**fields: object) -> MachineSession:
        built = {"environment": "built", "requirements": tmp_path / "pins.txt", "wheels": wheels, **fields}
        write_inventory(tmp_path / "machines.toml", hosts[0], **built)
        remote = Remote("host-a", find_host("host-a"), 60.0).open()
        store = LocalStore(tmp_path / "store")
        settings = MachineConfig(kind="ssh", name="host-a")
        made.append(SSHMachine(remote, store, settings, "a test"))
        return MachineSession(made[-1], store, settings, run_log)

    yield reach
    for machine in made:
        machine.release()


def prepared(session: MachineSession) -> tuple[list[str], ArtifactId]:
    assert isinstance(session.machine, SSHMachine)
    *said, artifact = prepare_environment(session.machine, session)
    assert isinstance(artifact, ArtifactId)
    return [line for line in said if isinstance(line, str)], artifact


def test_it_is_built_once_and_found_again(reach: Callable[..., MachineSession], tmp_path: Path) -> None:
    session = reach()
    said, artifact = prepared(session)
    assert any("Successfully installed tiny-1.0" in line for line in said)
    answer = subprocess.run(
        [session.machine.python, "-c", "import tiny; print(tiny.VALUE)"], capture_output=True, text=True
    )
    assert answer.stdout == "1\n"
    again, same = prepared(reach())
    assert (again, same) == ([], artifact)
    described = json.loads((LocalStore(tmp_path / "store").open(artifact) / "environment.json").read_text())
    assert described["pins"] == ["tiny==1.0"]
    assert described["versions"]["tiny"] == "1.0"


def test_on_a_cluster_a_node_builds_it(cluster: Cluster, tmp_path: Path, wheels: Path, run_log: RunLog) -> None:
    inventory = tmp_path / "machines.toml"
    own = f'environment = "built"\nrequirements = "{tmp_path}/pins.txt"\nwheels = "{wheels}"'
    inventory.write_text(inventory.read_text().replace('environment = "own"', own))
    store, settings = LocalStore(tmp_path / "store"), MachineConfig(kind="slurm", name="cluster", gpus=0)
    machine = SSHMachine(Remote("cluster", find_host("cluster"), 60.0).open(), store, settings, "a test")
    said, _ = prepared(MachineSession(machine, store, settings, run_log))
    assert any("Successfully installed tiny-1.0" in line for line in said)
    (job,) = (cluster.host.work / "store" / "jobs").glob("environment-*")
    assert json.loads((job / "allocation").read_text())["node"] == 0
    machine.release()
    until(lambda: not cluster.jobs(), "the allocation is given back", 30.0)


def test_uv_builds_it_where_the_host_has_uv(reach: Callable[..., MachineSession], hosts: Hosts, tmp_path: Path) -> None:
    uv = shutil.which("uv", path=str(Path(sys.executable).parent))
    assert uv is not None, "uv is among the development requirements"
    (hosts[0].directory / ".local" / "bin").mkdir(parents=True)
    (hosts[0].directory / ".local" / "bin" / "uv").symlink_to(uv)
    try:
        said, artifact = prepared(reach())
    finally:
        shutil.rmtree(hosts[0].directory / ".local")
    assert any("uv pip install" in line for line in said)
    assert (
        json.loads((LocalStore(tmp_path / "store").open(artifact) / "environment.json").read_text())["installer"]
        == "uv"
    )


def test_a_build_that_fails_shows_the_installers_last_lines_and_leaves_nothing(
    reach: Callable[..., MachineSession], hosts: Hosts, tmp_path: Path
) -> None:
    (tmp_path / "pins.txt").write_text("tiny==2.0\n")
    with pytest.raises(JobFailed, match="could not be built") as caught:
        prepared(reach())
    assert any("No matching distribution found for tiny==2.0" in line for line in caught.value.last_lines)
    assert not list((hosts[0].work / "environments").iterdir())


def test_an_environment_of_its_own_that_lacks_something_is_refused(
    reach: Callable[..., MachineSession], tmp_path: Path
) -> None:
    with pytest.raises(Exception, match="can't import what jobs need") as caught:
        prepared(reach(environment="own"))
    assert "No module named 'tiny'" in str(caught.value)


def test_files_that_are_not_there_are_named(reach: Callable[..., MachineSession], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"requirements .*none\.txt: No such file"):
        prepared(reach(requirements=tmp_path / "none.txt"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="there is no wheel"):
        prepared(reach(wheels=tmp_path / "empty"))


def test_the_pins_are_what_is_installed_here_without_local_builds() -> None:
    pins = dict(pin.split("==") for pin in installed_pins())
    assert {"torch", "transformers", "safetensors", "pydantic", "pydantic-core"} <= set(pins)
    assert not {"prefect", "paramiko", "pytest"} & set(pins)
    assert not any("+" in version for version in pins.values())
