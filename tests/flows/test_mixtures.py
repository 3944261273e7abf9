"""Whole runs of a mixture of experts: balanced, replayed, and shared by ranks."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rollouts_core.metrics.loggers import read_jsonl
from tests.conftest import COMMAND_DEADLINE, Done
from tests.flows.test_ranks import ranks_of
from tests.flows.test_run import begin_run, wait_for
from tests.rollouts_core.models import character_tokenizer
from tests.rollouts_core.training.test_families import family

Rollouts = Callable[..., Done]
pytestmark = pytest.mark.slow


@pytest.fixture
def mixture_config(small_config: dict[str, Any], tmp_path: Path) -> Callable[..., Path]:
    """Of a published mixture, in a directory; its experts are kept even, and the engine's choices replayed."""
    published = tmp_path / "published"
    family("qwen3_moe", num_key_value_heads=4, initializer_range=0.1).save_pretrained(published)
    character_tokenizer().save_pretrained(published)

    def write(**backend: Any) -> Path:
        data = small_config | {
            "model": {"kind": "pretrained", "name": str(published), "dtype": "float32"},
            "backend": {"balance_experts": True, **backend},
            "engine": {"replay_experts": True},
        }
        data["sft"] |= {"steps": 40, "log_every": 1}
        data["rl"] |= {"steps": 2, "minibatches": 2}
        file = tmp_path / "config.json"
        file.write_text(json.dumps(data))
        return file

    return write


def metrics_of(done: Done) -> dict[str, list[dict[str, Any]]]:
    assert done.status == 0, done.err
    results = Path(done.json()["report"]).parent
    return {part: read_jsonl(results / f"{part}_metrics.jsonl") for part in ("sft", "rl")}


def test_a_mixture_is_trained_through_the_experts_that_its_engine_chose(
    rollouts: Rollouts, mixture_config: Callable[..., Path], tmp_path: Path
) -> None:
    found = metrics_of(rollouts("run", mixture_config(), "--json", "--store", tmp_path / "store"))
    assert all(1.0 <= record["experts/busiest"] <= 4.0 for record in found["sft"] + found["rl"])
    assert "experts/changed" not in found["sft"][0]
    assert all(record["experts/changed"] < 0.2 for record in found["rl"])
    assert all(record["sampling/sampling_logp_difference/mean"] < 1e-4 for record in found["rl"])


def test_ranks_that_share_experts_learn_what_one_device_learns(
    rollouts: Rollouts, mixture_config: Callable[..., Path], tmp_path: Path
) -> None:
    one, two = (
        metrics_of(rollouts("run", mixture_config(**layout), "--json", "--store", tmp_path / f"store-{name}"))
        for name, layout in (("one", {}), ("two", {"processes": 2, "parallel": {"expert": 2}}))
    )
    for alone, shared in zip(one["sft"], two["sft"], strict=True):
        assert alone["loss"] == pytest.approx(shared["loss"], rel=1e-3)
        assert alone["experts/busiest"] == pytest.approx(shared["experts/busiest"], rel=0.1)
    assert one["rl"][0]["reward"] == pytest.approx(two["rl"][0]["reward"], abs=0.3)
    assert all(record["sampling/sampling_logp_difference/mean"] < 1e-4 for record in two["rl"])


def test_ranks_that_share_experts_end_with_the_same_bits_when_one_was_killed(
    rollouts: Rollouts, mixture_config: Callable[..., Path], command_environment: dict[str, str], tmp_path: Path
) -> None:
    """In SFT, behind a checkpoint; RL follows."""
    config = mixture_config(processes=2, parallel={"expert": 2})
    done = rollouts("run", config, "--json", "--store", tmp_path / "whole")
    assert done.status == 0, done.err
    first = Path(done.json()["report"]).parent / "policy" / "model.safetensors"
    run = begin_run(config, command_environment, tmp_path)
    job = wait_for(lambda: next(iter((tmp_path / ".rollouts" / "jobs").glob("sft-*")), None))
    wait_for(lambda: list((tmp_path / ".rollouts" / "work").glob("sft-*/checkpoints/step-*")))
    os.kill(ranks_of(job)[1], signal.SIGKILL)
    assert run.wait(COMMAND_DEADLINE) == 0, (tmp_path / "run.log").read_text()
    assert "resuming after step" in (job / "log").read_text()
    (second,) = set((tmp_path / "outputs").glob("*/policy/model.safetensors")) - {first}
    again = load_file(second)
    assert all((again[name] == value).all() for name, value in load_file(first).items())
