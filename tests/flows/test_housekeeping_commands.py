"""verify, refresh, pin, gc, lineage and diff from the command line, and a store on S3 shared by two machines."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.store.objects import RemoteObjects
from tests.conftest import COMMAND_DEADLINE, Done
from tests.flows.test_run import states

Rollouts = Callable[..., Done]
SHORT: dict[str, Any] = {"sft": {"steps": 10}, "rl": None, "data": {"heldout": None}}


@pytest.mark.slow
def test_looking_after_a_store(rollouts: Rollouts, config_file: Callable[..., Path], tmp_path: Path) -> None:
    config = config_file(**SHORT)
    first = rollouts("run", config, "--json").json()
    keys = {stage["name"]: stage["key"] for stage in first["stages"]}
    artifact = f"sft-{keys['sft'][:16]}"
    whole = rollouts("verify")
    assert whole.status == 0
    assert {line.partition("-")[0] for line in whole.out.splitlines()} == {"bootstrap", "tokenize", "sft"}

    weights = tmp_path / ".rollouts" / "artifacts" / artifact / "files" / "policy" / "model.safetensors"
    weights.chmod(0o644)
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    damaged = rollouts("verify")
    assert damaged.status == 1
    assert f"{artifact:<34} DAMAGED" in damaged.out
    assert "policy/model.safetensors: has another content of the same size" in damaged.out
    assert [row["state"] for row in rollouts("plan", config, "--json").json()] == ["cached", "to run"]

    again = rollouts("run", config, "--json", "--set", "sft.weight_decay=0.5")
    assert states(again.json())["tokenize"] == "Cached"
    assert states(again.json())["sft"] == "Completed"
    assert "to run: no artifact of this kind is in the store" in again.err

    refreshed = rollouts("run", config, "--json", "--set", "sft.weight_decay=0.5", "--refresh", "tokenize")
    assert {states(refreshed.json())[name] for name in ("tokenize", "sft")} == {"Completed"}, refreshed.err
    assert refreshed.json()["refreshed"] == ["tokenize", "sft"]
    wrong = rollouts("run", config, "--refresh", "stf")
    assert wrong.status == 1
    assert "to make again; there are sft, tokenize" in wrong.err

    difference = rollouts("diff", first["run_id"], again.json()["run_id"]).out
    assert "sft.weight_decay" in difference
    descent = rollouts("lineage", "sft").out
    for words in ("sft-", "data: tokenize-", "demonstrations: ", "sha256 ", f"run {again.json()['run_id']}"):
        assert words in descent

    assert rollouts("gc", "--keep-last", "1", "--dry-run", "--json").json()["removed"] != []
    assert "pinned" in rollouts("pin", "sft", "--reason", "pinned by hand").out
    removed = rollouts("gc", "--keep-last", "0", "--json").json()["removed"]
    gone = {entry["name"].partition("-")[0] for entry in removed if entry["kind"] == "artifact"}
    assert gone == {"bootstrap"}, "what the pinned artifact was made from stays"
    assert rollouts("plan", config, "--json", "--set", "sft.weight_decay=0.5").json()[1]["state"] == "cached"
    assert rollouts("gc", "--keep-last", "-1").status == 1


@pytest.fixture
def laptops(
    config_file: Callable[..., Path], tmp_path: Path, command_environment: dict[str, str], s3_url: str
) -> Callable[[str], "subprocess.Popen[str]"]:
    """Begin the same run with a directory of one's own and the store on S3."""
    config = config_file(**SHORT).read_text()

    def begin(name: str) -> "subprocess.Popen[str]":
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(config)
        environment = {**command_environment, "AWS_ENDPOINT_URL": os.environ["AWS_ENDPOINT_URL"]}
        command = [sys.executable, "-m", "flows.cli", "run", "config.json", "--store", s3_url]
        return subprocess.Popen(
            command, cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    return begin


@pytest.mark.slow
def test_two_machines_that_want_the_same_make_it_once(
    laptops: Callable[[str], "subprocess.Popen[str]"], tmp_path: Path, rollouts: Rollouts, s3_url: str
) -> None:
    runs = [laptops(name) for name in ("one", "other")]
    said = [run.communicate(timeout=COMMAND_DEADLINE)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(said)
    for stage in ("tokenize", "sft"):
        logs = [path.read_text() for path in tmp_path.glob(f"*/.rollouts/jobs/{stage}-*/log")]
        made = [log for log in logs if f"making {stage}-" in log]
        waited = [log for log in made if "waiting: it is being made by process" in log]
        assert len(made) - len(waited) <= 1, logs
    policies = [next((tmp_path / name / "outputs").glob("*/policy/model.safetensors")) for name in ("one", "other")]
    assert policies[0].read_bytes() == policies[1].read_bytes()
    assert rollouts("verify", "--store", s3_url, "--json").json()["damaged"] == {}
    stored = [path for path in tmp_path.rglob("*") if path.is_file() and b"tests-secret" in path.read_bytes()]
    assert stored == [], "a secret was written down"


def test_an_unfinished_upload_is_no_damage(rollouts: Rollouts, s3_url: str) -> None:
    RemoteObjects(s3_url).write("artifacts/sft-0123456789abcdef/files/policy.0011223344556677", b"half")
    done = rollouts("verify", "--store", s3_url, AWS_ENDPOINT_URL=os.environ["AWS_ENDPOINT_URL"])
    assert (done.status, done.out) == (0, "")
