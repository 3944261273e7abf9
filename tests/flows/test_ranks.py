"""Whole runs whose training stages are several ranks: one device's results, and deaths that are told and mended."""

import json
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rollouts_core.metrics.loggers import read_jsonl
from tests.conftest import COMMAND_DEADLINE, Done
from tests.flows.test_run import begin_run, wait_for

Rollouts = Callable[..., Done]


def ranks_of(job: Path) -> dict[int, int]:
    """Process by rank."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
                environ = (entry / "environ").read_bytes().split(b"\0")
                variables = dict(part.split(b"=", 1) for part in environ if b"=" in part)
            except OSError:
                continue
            if b"rollouts_core.stages.job" in arguments and str(job).encode() in arguments and b"RANK" in variables:
                found[int(variables[b"RANK"])] = int(entry.name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["", "context", "tensor"])
def test_two_ranks_learn_what_one_device_learns(
    shared: str, rollouts: Rollouts, config_file: Callable[..., Path], tmp_path: Path
) -> None:
    """SFT, then two RL segments with the embedded engine on rank 0, a critic, and a reference that ranks share."""
    metrics, temporary = {}, tmp_path / "temporary"
    temporary.mkdir()
    for processes in (1, 2):
        store = tmp_path / f"store-{processes}"
        ppo = {"algorithm": {"kind": "ppo"}, "kl_coef": 0.1}
        backend = {"processes": processes, "parallel": {shared: 2} if shared and processes == 2 else {}}
        model = {"hidden_size": 32, "heads": 4, "kv_heads": 4}
        config = config_file(model=model, backend=backend, sft={"steps": 20}, rl=ppo)
        done = rollouts("run", config, "--json", "--store", store, TMPDIR=str(temporary))
        assert done.status == 0, done.err
        results = Path(done.json()["report"]).parent
        metrics[processes] = [read_jsonl(results / f"{part}_metrics.jsonl") for part in ("sft", "rl")]
        assert list(load_file(results / "policy" / "model.safetensors"))
    assert list(temporary.glob("torchelastic*")) == []
    for one, other in zip(*(metrics[processes][0] for processes in (1, 2)), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    first, second = (metrics[processes][1][0] for processes in (1, 2))
    assert first["reward"] == pytest.approx(second["reward"], abs=0.3)
    assert all(record["sampling/sampling_logp_difference/mean"] < 1e-4 for record in metrics[2][1])


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_and_the_run_goes_on(
    rank: int, config_file: Callable[..., Path], command_environment: dict[str, str], tmp_path: Path
) -> None:
    config = config_file(backend={"processes": 2}, sft={"steps": 150, "log_every": 1}, rl=None)
    run = begin_run(config, command_environment, tmp_path)
    job = wait_for(lambda: next(iter((tmp_path / ".rollouts" / "jobs").glob("sft-*")), None))
    wait_for(lambda: list((tmp_path / ".rollouts" / "work").glob("sft-*/checkpoints/step-*")))
    before = ranks_of(job)
    os.kill(before[rank], signal.SIGKILL)
    gone = time.monotonic() + COMMAND_DEADLINE
    while any(Path(f"/proc/{process}").exists() for process in before.values()):
        assert time.monotonic() < gone, "a rank outlived the other"
        time.sleep(0.1)
    assert run.wait(COMMAND_DEADLINE) == 0, (tmp_path / "run.log").read_text()
    log = (job / "log").read_text()
    assert f"rank {rank} of 2 was ended by SIGKILL" in log
    assert "resuming after step" in log
    assert json.loads((job / "attempt.json").read_text())["number"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(("context", "tensor"), [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
def test_a_group_that_lost_a_rank_ends_with_the_same_bits(
    context: int,
    tensor: int,
    rollouts: Rollouts,
    config_file: Callable[..., Path],
    command_environment: dict[str, str],
    tmp_path: Path,
) -> None:
    """SFT by ranks that share passes or do not; the last rank is killed behind a checkpoint."""
    processes = max(2, context * tensor)
    backend = {"processes": processes, "parallel": {"context": context, "tensor": tensor}}
    model = {"hidden_size": 32, "heads": 4, "kv_heads": 4}
    config = config_file(model=model, backend=backend, sft={"steps": 80, "log_every": 1}, rl=None)
    done = rollouts("run", config, "--json", "--store", tmp_path / "whole")
    assert done.status == 0, done.err
    first = Path(done.json()["report"]).parent / "policy" / "model.safetensors"
    run = begin_run(config, command_environment, tmp_path)
    job = wait_for(lambda: next(iter((tmp_path / ".rollouts" / "jobs").glob("sft-*")), None))
    wait_for(lambda: list((tmp_path / ".rollouts" / "work").glob("sft-*/checkpoints/step-*")))
    os.kill(ranks_of(job)[processes - 1], signal.SIGKILL)
    assert run.wait(COMMAND_DEADLINE) == 0, (tmp_path / "run.log").read_text()
    assert "resuming after step" in (job / "log").read_text()
    (second,) = set((tmp_path / "outputs").glob("*/policy/model.safetensors")) - {first}
    found = load_file(second)
    assert all(found[name].equal(value) for name, value in load_file(first).items())


@pytest.mark.slow
def test_a_rank_without_memory_is_named_and_the_run_ends(
    config_file: Callable[..., Path], command_environment: dict[str, str], tmp_path: Path
) -> None:
    config = config_file(
        backend={"processes": 2}, sft={"steps": 5000, "log_every": 1, "batch_size": 64, "tokens_per_pass": 500}, rl=None
    )
    run = begin_run(config, command_environment, tmp_path)
    job = wait_for(lambda: next(iter((tmp_path / ".rollouts" / "jobs").glob("sft-*")), None))
    wait_for(lambda: list((tmp_path / ".rollouts" / "work").glob("sft-*/checkpoints/step-*")))
    rank = ranks_of(job)[1]
    resource.prlimit(rank, resource.RLIMIT_DATA, (2**20, 2**20))
    assert run.wait(COMMAND_DEADLINE) == 1
    log = (tmp_path / "run.log").read_text()
    assert "stage sft: rank 1 of 2: out of memory on cpu: " in log
    assert "determine it: tokens_per_pass" in log
    assert json.loads((job / "attempt.json").read_text())["number"] == 1
    assert not Path(f"/proc/{rank}").exists()


@pytest.mark.slow
def test_ranks_go_with_their_runner(
    config_file: Callable[..., Path], command_environment: dict[str, str], tmp_path: Path
) -> None:
    config = config_file(backend={"processes": 2}, sft={"steps": 5000, "log_every": 1}, rl=None)
    run = begin_run(config, command_environment, tmp_path)
    job = wait_for(lambda: next(iter((tmp_path / ".rollouts" / "jobs").glob("sft-*")), None))
    ranks: dict[int, Any] = wait_for(lambda: found if len(found := ranks_of(job)) == 2 else None)
    run.send_signal(signal.SIGTERM)
    assert run.wait(COMMAND_DEADLINE) != 0
    wait_for(lambda: not any(Path(f"/proc/{process}").exists() for process in ranks.values()))
