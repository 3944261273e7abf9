"""Each bad input: one clear message, a non-zero exit, earlier artifacts intact."""

import http.server
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.host.system import free_port
from tests.answering import SSH, answering, ok
from tests.conftest import Done

Rollouts = Callable[..., Done]
ROW = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "02"}], "answer": "02"}


@pytest.fixture
def source(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A JSONL source of the given lines."""

    def write(*lines: Any) -> dict[str, Any]:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return {"kind": "jsonl", "path": str(path)}

    return write


def refused(done: Done, *words: str) -> None:
    assert done.status == 1, (done.out, done.err)
    said = done.err + done.out
    flat = " ".join(said.split())
    for word in words:
        assert word in flat, said
    assert "Traceback" not in said


def test_missing_files_and_rewards_are_listed_together(rollouts: Rollouts, config_file: Callable[..., Path]) -> None:
    missing = {"kind": "jsonl", "path": "/nowhere/d.jsonl"}
    config = config_file(data={"demonstrations": missing}, rl={"reward": "no.such.module:f"})
    refused(
        rollouts("run", config),
        "2 problems",
        "data.demonstrations: no such data file: /nowhere/d.jsonl",
        "rl.reward: reward 'no.such.module:f': no module 'no.such.module' can be imported",
    )


def test_a_broken_line(rollouts: Rollouts, config_file: Callable[..., Path], source: Any) -> None:
    config = config_file(data={"demonstrations": source(ROW, '{"messages": [', ROW, "3")})
    refused(rollouts("run", config), "rows.jsonl:2: not valid JSON", "rows.jsonl:4: a int, not an object")


@pytest.mark.slow
def test_an_example_longer_than_the_context(rollouts: Rollouts, config_file: Callable[..., Path], source: Any) -> None:
    long = {"messages": [{"role": "user", "content": "1+" * 9}, {"role": "assistant", "content": "09"}]}
    config = config_file(data={"demonstrations": source(ROW, long)})
    refused(rollouts("run", config), "rows.jsonl:2: 23 tokens, longer than the 12")


@pytest.mark.slow
def test_an_empty_data_set(rollouts: Rollouts, config_file: Callable[..., Path], source: Any) -> None:
    refused(rollouts("run", config_file(data={"prompts": source()})), "rows.jsonl: the data set is empty")


def test_an_unknown_model_offline(rollouts: Rollouts, config_file: Callable[..., Path]) -> None:
    config = json.loads(config_file().read_text())
    config["model"] = {"kind": "pretrained", "name": "nobody/nothing"}
    path = config_file(model=None)
    path.write_text(json.dumps(config))
    refused(rollouts("run", path), "model.name: model 'nobody/nothing' can't be found", "revision=<40-digit commit>")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param("return float('nan')", "returned nan, which is not a finite number", marks=pytest.mark.slow),
        pytest.param("return None", "returned None, which is not a finite number", marks=pytest.mark.slow),
        ("raise KeyError('solution')", "raised KeyError: 'solution'"),
    ],
)
def test_a_reward_that_fails_leaves_earlier_artifacts(
    rollouts: Rollouts, config_file: Callable[..., Path], tmp_path: Path, body: str, words: str
) -> None:
    (tmp_path / "my_reward.py").write_text(f"def score(sample):\n    {body}\n")
    config = config_file(sft={"steps": 5, "warmup_steps": 1}, rl={"reward": f"{tmp_path}/my_reward.py:score"})
    done = rollouts("run", config)
    refused(done, "stage rl-1: reward", "my_reward.py:score on source row", words)
    cached = [row["stage"] for row in rollouts("plan", config, "--json").json() if row["state"] == "cached"]
    assert cached == ["tokenize", "sft"]
    (record,) = rollouts("runs", "--json").json()
    assert record["state"] == "Failed"
    assert words in record["error"]


def test_a_reward_that_does_not_import(rollouts: Rollouts, config_file: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text("import nonsense\n")
    config = config_file(rl={"reward": f"{tmp_path}/my_reward.py:score"})
    refused(rollouts("run", config), "its import raised ModuleNotFoundError: No module named 'nonsense'")


@pytest.fixture(params=[ok(b"hello"), SSH], ids=["http", "ssh"])
def stranger(request: pytest.FixtureRequest) -> Iterator[str]:
    """A port taken by a program that is no Prefect server."""
    with answering(request.param) as url:
        yield f"{url}/api"


def test_a_port_taken_by_another_program(rollouts: Rollouts, config_file: Callable[..., Path], stranger: str) -> None:
    done = rollouts("run", config_file(), PREFECT_API_URL=stranger)
    refused(done, "no Prefect server", "PREFECT_API_URL")


def test_a_server_that_does_not_answer(rollouts: Rollouts, config_file: Callable[..., Path]) -> None:
    url = f"http://127.0.0.1:{free_port()}/api"
    refused(rollouts("run", config_file(), PREFECT_API_URL=url), f"no Prefect server answers at {url}")


def test_a_store_that_cannot_be_written(rollouts: Rollouts, config_file: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = rollouts("run", config_file(), "--store", tmp_path / "file" / "store")
    refused(done, "can't be written", "--store")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a file system of a given size; needs root."""
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("mounting a tmpfs needs root")
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        path = tmp_path / "disk"
        path.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_no_free_disk_at_the_start(
    rollouts: Rollouts, config_file: Callable[..., Path], small_disk: Callable[[str], Path]
) -> None:
    done = rollouts("run", config_file(), "--store", small_disk("20m") / "store")
    refused(done, "MiB of free disk, less than 256", "--store")


@pytest.mark.slow
def test_the_disk_fills_up_while_a_stage_runs(
    rollouts: Rollouts, config_file: Callable[..., Path], small_disk: Callable[[str], Path]
) -> None:
    """SFT's checkpoints do not fit. What was finished stays; with room again, the same command completes."""
    disk = small_disk("300m")
    config = config_file(
        model={"hidden_size": 1024, "intermediate_size": 4096, "layers": 2, "heads": 4, "kv_heads": 4},
        sft={"steps": 6, "warmup_steps": 1, "checkpoint_every": 2},
        rl=None,
        data={"heldout": None},
    )
    refused(rollouts("run", config, "--store", disk / "store"), "stage sft: no space left on the disk")
    cached = rollouts("plan", config, "--store", disk / "store", "--json").json()
    assert [row["state"] for row in cached] == ["cached", "to run"]
    assert not any((disk / "store" / "staging").iterdir())
    subprocess.run(["mount", "-o", "remount,size=4g", str(disk)], check=True)
    done = rollouts("run", config, "--store", disk / "store")
    assert done.status == 0, done.err


def test_usage_errors(rollouts: Rollouts) -> None:
    assert rollouts("dance").status == 2
    refused(rollouts("run", "absent.py"), "no such config file: absent.py")
    refused(rollouts("plan", Path(http.server.__file__)), "defines no `config = PipelineConfig(...)`")
