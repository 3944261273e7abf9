"""How servers are started: which GPUs each gets, what is passed through, and what their environments are made of."""

import json
from pathlib import Path

import pytest

from infra.errors import JobFailed
from infra.jobs.session import MachineSession
from infra.machines.local import LocalMachine
from infra.python_envs.engine import Packages, build
from infra.servers.job import UNATTENDED_SECONDS, serve_job
from infra.servers.model import ServedModel
from infra.servers.packages import packages_of
from rollouts_core.config import EngineConfig, MachineConfig, placement_of
from rollouts_core.observe.runs import RunLog
from rollouts_core.store.local import LocalStore

MODEL = ServedModel("/store/policy", "bfloat16", 4096)


def spec_of(gpus: int, **settings: object) -> dict[str, object]:
    config = EngineConfig(**{"kind": "sglang", **settings})  # type: ignore[arg-type]
    command, placement = ["python", "servers", "{directory}"], placement_of(gpus, 1, config)
    job = serve_job("rl-1-abc", command, config, MODEL, "/env/python", placement, "/dev/shm/x.y")
    assert job.name == "serve-rl-1-abc" and job.unattended_limit == UNATTENDED_SECONDS
    return dict(job.spec)


def devices(spec: dict[str, object]) -> list[list[int]]:
    replicas = spec["replicas"]
    assert isinstance(replicas, list)
    return [replica["devices"] for replica in replicas]


@pytest.mark.parametrize(
    ("gpus", "replicas", "tensor", "data", "expected", "colocated"),
    [
        (0, 2, 1, 1, [[], []], False),
        (1, 1, 1, 1, [[0]], True),
        (2, 1, 1, 1, [[1]], False),
        (2, 2, 1, 1, [[0], [1]], True),
        (5, 2, 2, 1, [[1, 2], [3, 4]], False),
        (4, 2, 2, 1, [[0, 1], [2, 3]], True),
        (8, 1, 2, 2, [[1, 2, 3, 4]], False),
    ],
)
def test_the_trainer_has_the_first_gpu_where_there_are_enough(
    gpus: int, replicas: int, tensor: int, data: int, expected: list[list[int]], colocated: bool
) -> None:
    spec = spec_of(gpus, replicas=replicas, tensor_parallel=tensor, data_parallel=data)
    assert devices(spec) == expected
    assert spec["colocated"] == colocated


def test_a_router_stands_before_several_replicas_of_sglang_only() -> None:
    assert spec_of(0)["router"] is None
    assert spec_of(0, replicas=2)["router"] is not None
    assert spec_of(0, replicas=2, kind="vllm")["router"] is None


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_further_arguments_come_last_and_servers_stay_on_the_loopback(kind: str) -> None:
    replicas = spec_of(0, kind=kind, arguments=("--quantization", "fp8"))["replicas"]
    assert isinstance(replicas, list)
    command = replicas[0]["command"]
    assert command[-2:] == ["--quantization", "fp8"]
    assert command[command.index("--host") + 1] == "127.0.0.1" and "{port}" in command
    assert "bfloat16" in command and "/store/policy" in command


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_packages_are_the_ordinary_ones_on_gpus_and_complete_pins_without(kind: str) -> None:
    assert not packages_of(kind, on_gpu=True).no_deps
    without = packages_of(kind, on_gpu=False)
    assert without.no_deps and all("==" in pin for pin in without.requirements)
    assert any(pin.startswith("torch==") for pin in without.requirements)
    assert "sitecustomize.py" in without.files


def test_an_environment_is_built_on_this_machine_once_with_modules_of_ours(tmp_path: Path, run_log: RunLog) -> None:
    store = LocalStore(tmp_path / "store")
    session = MachineSession(LocalMachine(store), store, MachineConfig(), run_log)
    check = "import json, stand_in; print(json.dumps({'value': stand_in.VALUE}))"
    packages = Packages((), check, True, {"stand_in.py": "VALUE = 7"})
    place = tmp_path / "environments" / "servers"
    said = list(build(session, packages, place))
    assert any("install" in line for line in said)
    assert json.loads((place / "environment.json").read_text())["imports"] == {"value": 7}
    assert not any(build(session, packages, place))
    with pytest.raises(JobFailed, match="the servers' environment could not be built"):
        list(build(session, Packages(("no-such-package-at-all==1",), check), tmp_path / "environments" / "other"))
