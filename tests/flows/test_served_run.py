"""Whole runs with the real SGLang: with its servers killed under it, with bad servers, and what is left afterwards."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.conftest import Done, until
from tests.hosts import HostMachine
from tests.servers import engine_python

pytestmark = pytest.mark.sglang
DEADLINE = 400.0


@pytest.fixture
def served(config_file: Callable[..., Path]) -> Callable[..., Path]:
    """The small config on SGLang, longer, so that there is time to disturb it."""

    def write(**parts: Any) -> Path:
        engine = {"kind": "sglang", "python": engine_python("sglang"), "max_running_requests": 32}
        engine |= {"hang_seconds": 15.0, **parts.pop("engine", {})}
        return config_file(
            engine=engine,
            rl={
                "steps": 150,
                "steps_per_segment": 150,
                "learning_rate": 0.003,
                "checkpoint_every": 10,
                **parts.pop("rl", {}),
            },
            **parts,
        )

    return write


def servers_of(store: Path) -> dict[str, Any]:
    for file in (store / "jobs").glob("serve-*/servers.json"):
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    return {"replicas": [], "router": None}


def processes_below(store: Path) -> list[int]:
    """Of SGLang, wherever they came from: the model they serve is in this store."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if "sglang" in command and str(store) in command:
                found.append(int(entry.name))
    return found


def step_of(store: Path) -> int:
    """The last step that RL has logged."""
    lines = [line for file in store.glob("work/rl-*/metrics.jsonl") for line in file.read_text().splitlines()]
    return int(json.loads(lines[-1])["step"]) if lines else 0


def test_the_policy_of_a_run_is_served_by_its_engine(
    served: Callable[..., Path], rollouts: Callable[..., Done], command_environment: dict[str, str], tmp_path: Path
) -> None:
    """`rollouts serve` starts SGLang's server and ends it; greedy, it says what the embedded engine says."""
    config = served(rl={"steps": 2, "steps_per_segment": 2})
    run = json.loads(rollouts("run", config, "--json").out)["run_id"]
    said = rollouts("chat", run, "--prompt", "1+2=", "--max-new-tokens", "4").out.strip()
    command = [sys.executable, "-m", "flows.cli", "serve", run, "--port", "0"]
    with subprocess.Popen(command, env=command_environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        url = next(word for word in serving.stdout.readline().split() if word.startswith("http")).rstrip(";")
        assert processes_below(tmp_path / ".rollouts")
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        messages: Any = [{"role": "user", "content": "1+2="}]
        done = client.chat.completions.create(model="policy", messages=messages, temperature=0, max_tokens=4)
        serving.send_signal(signal.SIGINT)
        serving.wait(60)
    assert (done.choices[0].message.content or "").strip() == said
    until(lambda: not processes_below(tmp_path / ".rollouts"), "the servers to end", 60)


def test_reward_rises_while_replicas_are_killed(
    served: Callable[..., Path], command_environment: dict[str, str], tmp_path: Path
) -> None:
    store = tmp_path / ".rollouts"
    config = served(engine={"replicas": 2}, rl={"batch_size": 16})
    run = subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "run", str(config), "--json"],
        env=command_environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    killed: list[int] = []
    end = time.monotonic() + DEADLINE
    while run.poll() is None and time.monotonic() < end:
        replicas = servers_of(store)["replicas"]
        if len(killed) < 2 and step_of(store) >= (5, 50)[len(killed)] and replicas[len(killed)]["state"] == "ready":
            victim = _main_process(replicas[len(killed)]["url"], store)
            os.kill(victim, signal.SIGKILL if not killed else signal.SIGSTOP)
            killed.append(victim)
        time.sleep(0.1)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0, err[-3000:]
    assert len(killed) == 2
    record = json.loads(out)
    (metrics,) = (tmp_path / "outputs" / record["run_id"]).glob("rl_metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 151))
    first, last = (sum(line["reward"] for line in part) / 20 for part in (lines[:20], lines[-20:]))
    assert last > first + 0.1
    assert max(line["sampling/sampling_logp_difference/mean"] for line in lines) < 1e-4, "no token of other weights"
    assert processes_below(store) == []


def test_a_server_that_cannot_start_says_why(
    served: Callable[..., Path], rollouts: Callable[..., Done], tmp_path: Path
) -> None:
    """No memory for its cache: its own last lines are what the run ends with."""
    arguments = ["--mem-fraction-static=-0.5"]
    done = rollouts("run", served(engine={"arguments": arguments, "start_minutes": 2.0}))
    assert done.status == 1
    assert "replica-0 ended with exit status" in done.err and "3 times in a row" in done.err
    assert "Loaded weights leave no GPU memory for the KV cache" in done.err
    assert processes_below(tmp_path / ".rollouts") == []


def test_servers_run_beside_the_trainer_on_a_host(
    served: Callable[..., Path], rollouts: Callable[..., Done], hosts: tuple[HostMachine, HostMachine], tmp_path: Path
) -> None:
    machine = {"device": "cpu"}  # the inventory lends it a GPU that is not there
    config = served(engine={"weight_sync": "tensor"}, rl={"steps": 4, "steps_per_segment": 4}, machine=machine)
    inventory = {"ROLLOUTS_MACHINES": str(tmp_path / "machines.toml")}
    done = rollouts("run", config, "--machine", hosts[0].name, "--json", **inventory)
    assert done.status == 0, done.err[-3000:]
    record = done.json()
    (metrics,) = (tmp_path / "outputs" / record["run_id"]).glob("rl_metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert max(line["sampling/sampling_logp_difference/mean"] for line in lines) < 1e-4
    log = rollouts("logs", record["run_id"], "serve", **inventory)
    assert "replica-0" in log.out
    assert processes_below(hosts[0].work) == []


def test_evaluation_by_servers_gives_the_answers_of_the_embedded_engine(
    config_file: Callable[..., Path], rollouts: Callable[..., Done], tmp_path: Path
) -> None:
    engine = {"kind": "sglang", "python": engine_python("sglang"), "replicas": 2}
    answers = []
    for number, evaluation in enumerate(({}, {"engine": engine})):
        config = config_file(rl=None, sft={"steps": 40}, evaluation={"max_new_tokens": 3, **evaluation})
        done = rollouts("run", config, "--store", tmp_path / f"store-{number}")
        assert done.status == 0, done.err[-3000:]
        files = sorted(tmp_path.glob(f"store-{number}/artifacts/evaluate-*/files/samples.jsonl"))
        answers.append([[json.loads(line)["response"] for line in file.read_text().splitlines()] for file in files])
    assert answers[0] == answers[1] and len(answers[0]) == 2
    assert processes_below(tmp_path) == []


def _main_process(url: str, store: Path) -> int:
    port = url.rpartition(":")[2]
    for pid in processes_below(store):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        if "sglang.launch_server" in arguments and port in arguments:
            return pid
    raise AssertionError(f"nothing serves {url}")
