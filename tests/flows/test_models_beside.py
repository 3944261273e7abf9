"""Whole runs that ask models beside their policy: a teacher, a judge and a reward model, by servers of their own."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.metrics.loggers import read_jsonl
from tests.conftest import Done, until
from tests.flows.test_engine_machines import ENGINE, Hosts, command_line, processes_with
from tests.flows.test_remote_run import start, variables  # noqa: F401
from tests.hosts import HostMachine
from tests.rollouts_core.models import character_tokenizer, tiny_model
from tests.rollouts_core.rewards.test_judge import saved_reward_model
from tests.servers import engine_python

REWARDS = """
from contextlib import asynccontextmanager

from rollouts_core.inference.endpoints.openai import openai_endpoint
from rollouts_core.inference.endpoints.service import Service
from rollouts_core.rewards.model import RewardModelSettings, reward_model
from rollouts_core.rewards.reward import OpenReward
from rollouts_core.types.episode import AgentState

scored = reward_model(RewardModelSettings("served://scorer"))


@asynccontextmanager
async def opened():
    async with openai_endpoint(Service("served://talker/v1", "talker", temperature=0.0)) as endpoint:

        async def agrees(sample):
            answered = await endpoint.complete(AgentState(sample.prompt.messages), 3)
            return float(answered.message.content == sample.response)

        yield agrees


agreement = OpenReward(opened)
"""


@pytest.fixture
def asking(config_file: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A config whose policy has a teacher, a reward that asks a model, and an evaluation that asks another."""
    saved_reward_model(tmp_path / "scorer")
    for number, name in enumerate(("teacher", "talker")):
        tiny_model(seed=number).save_pretrained(tmp_path / name)
        character_tokenizer().save_pretrained(tmp_path / name)
    (tmp_path / "rewards.py").write_text(REWARDS)

    def write(by: dict[str, Any], scorer_by: dict[str, Any] | None = None, **parts: Any) -> Path:
        shared = {"max_length": 12, "engine": by}
        served = [
            {"name": name, "model": {"kind": "pretrained", "name": str(tmp_path / name)}, **shared, **given}
            for name, given in {
                "teacher": {"task": "score", "asked_by": ["rl"]},
                "talker": {"asked_by": ["rl"]},
                "scorer": {
                    "task": "score",
                    "max_length": 48,
                    "asked_by": ["evaluate"],
                    "engine": by if scorer_by is None else scorer_by,
                },
            }.items()
        ]
        path = config_file(
            sft={"steps": 20},
            rl={
                "steps": 2,
                "algorithm": {"kind": "distillation", "teacher": "served://teacher"},
                "reward": f"{tmp_path / 'rewards.py'}:agreement",
                **parts.pop("rl", {}),
            },
            evaluation={"reward": f"{tmp_path / 'rewards.py'}:scored"},
            **parts,
        )
        path.write_text(json.dumps({**json.loads(path.read_text()), "served": served}))
        return path

    return write


def test_a_teacher_a_judge_and_a_reward_model_are_asked_beside_the_policy(
    asking: Callable[..., Path], rollouts: Callable[..., Done], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    planned = rollouts("plan", asking({}), "--store", store).out
    assert "served   1 embedded server(s), asked by rl\n" in planned
    done = rollouts("run", asking({}), "--json", "--store", store)
    assert done.status == 0, done.err
    record = done.json()
    metrics = list(read_jsonl(tmp_path / "outputs" / record["run_id"] / "rl_metrics.jsonl"))
    assert all(line["kl"] != 0 for line in metrics), "the teacher is asked"
    told = {entry["point"]: entry for entry in record["accuracies"]}
    assert set(told) == {"base", "sft", "rl"}
    assert not processes_with(b"serving.beside", str(tmp_path).encode())
    states = {stage["name"]: stage["state"] for stage in record["stages"]}
    assert [states[f"serve-{name}"] for name in ("teacher", "talker", "scorer")] == ["Completed"] * 3
    assert rollouts("run", asking({}), "--store", store).status == 0
    logs = [file.read_text() for file in (store / "jobs").glob("serve-*/log")]
    assert [log.count("answers at") for log in logs] == [1, 1, 1], "a run that has all of it starts none"


def test_a_reward_model_on_servers_that_give_no_scores_is_refused(
    asking: Callable[..., Path], rollouts: Callable[..., Done], tmp_path: Path
) -> None:
    done = rollouts("run", asking({"kind": "sglang"}))
    assert done.status == 1 and not (tmp_path / ".rollouts" / "runs").exists()
    assert "served.scorer.engine.kind: sglang gives a teacher's log-probabilities" in done.err
    assert "is a reward model; use embedded" in done.err


@pytest.mark.sglang
def test_sglang_serves_a_teacher_and_a_judge(
    asking: Callable[..., Path], rollouts: Callable[..., Done], tmp_path: Path
) -> None:
    """What the teacher says is what our own server says of the same weights."""
    divergences = []
    for name, by in (("own", {}), ("sglang", {"kind": "sglang", "python": engine_python("sglang")})):
        done = rollouts("run", asking(by, {}), "--json", "--store", tmp_path / name)
        assert done.status == 0, done.err
        metrics = read_jsonl(tmp_path / "outputs" / done.json()["run_id"] / "rl_metrics.jsonl")
        divergences.append([line["kl"] for line in metrics])
    assert divergences[0] == pytest.approx(divergences[1], abs=1e-3) and all(divergences[0])


@pytest.mark.slow
def test_they_are_on_other_machines_and_one_is_killed(
    asking: Callable[..., Path],
    three_hosts: Hosts,
    variables: dict[str, str],  # noqa: F811
    start: Callable[..., "subprocess.Popen[str]"],  # noqa: F811
    tmp_path: Path,
) -> None:
    """The policy's servers are on the same machines, with leases of their own."""
    store = tmp_path / "store"
    config = asking(
        {"machines": {"names": ["host-b", "host-c"], "gpus": 0}, "replicas": 2, "start_minutes": 3.0},
        engine=ENGINE,
        rl={"steps": 60, "steps_per_segment": 60},
        machine={"device": "cpu"},
    )
    run = start("run", config, "--json", "--store", store)
    trainer = until(lambda: next((store / "jobs").glob("rl-1-*/metrics.jsonl"), None), "the trainer", 240.0)
    until(lambda: len(trainer.read_text().splitlines()) > 3, "a step", 120.0)
    b, c = (partial(beside, host) for host in three_hosts[1:])
    until(lambda: (len(b()), len(c())) == (3, 3), "all servers", 120.0)
    for pid in b():
        os.kill(pid, signal.SIGKILL)
    out, _ = run.communicate(timeout=300)
    assert run.returncode == 0, out[-3000:]
    assert all(line["kl"] != 0 for line in read_jsonl(next((tmp_path / "outputs").glob("*/rl_metrics.jsonl"))))
    assert all(host.idle() for host in three_hosts)


def beside(host: HostMachine) -> list[int]:
    """The processes of models beside the policy there."""
    return [pid for pid in host.processes() if b"serving.beside" in command_line(pid)]
