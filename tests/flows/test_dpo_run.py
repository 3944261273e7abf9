"""Whole runs with preferences: SFT, DPO, then RL held to what DPO left; and DPO of several ranks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.metrics.loggers import read_jsonl
from tests.addition import PROBLEMS
from tests.conftest import Done

Rollouts = Callable[..., Done]


@pytest.fixture
def preferring(config_file: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """The small config with right sums above wrong ones; further parts changed."""
    rows = [
        {"prompt": [{"role": "user", "content": f"{a}+{b}="}], "chosen": said(a + b), "rejected": said(a * b)}
        for a, b in PROBLEMS[::2]
        if a + b != a * b
    ]
    (tmp_path / "preferences.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "jsonl", "path": str(tmp_path / "preferences.jsonl")}
    dpo = {"steps": 8, "batch_size": 8, "learning_rate": 0.001, "log_every": 1}
    return lambda **parts: config_file(data={"preferences": source}, sft={"steps": 20}, dpo=dpo, **parts)


def said(number: int) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": f"{number:02d}"}]


@pytest.mark.slow
def test_sft_dpo_and_rl_in_one_run(rollouts: Rollouts, preferring: Callable[..., Path]) -> None:
    config = preferring(rl={"steps": 2, "kl_coef": 0.1})
    done = rollouts("run", config, "--json")
    assert done.status == 0, done.err
    record = done.json()
    names = [stage["name"] for stage in record["stages"]]
    assert names[names.index("sft") : names.index("evaluate-base")] == ["sft", "dpo", "serve", "rl-1"]
    assert [entry["point"] for entry in record["accuracies"]] == ["base", "sft", "dpo", "rl"]
    results = Path(record["report"]).parent
    assert [line["step"] for line in read_jsonl(results / "dpo_metrics.jsonl")] == list(range(1, 9))
    assert read_jsonl(results / "rl_metrics.jsonl")[0]["kl"] == pytest.approx(0, abs=1e-6)
    page = (results / "report.html").read_text()
    assert "after DPO" in page and "DPO: implicit reward" in page
    other = rollouts("plan", config, "--set", "dpo.beta=0.3", "--json").json()
    changed = {row["stage"]: row["because"] for row in other if row["state"] == "to run"}
    assert list(changed) == ["dpo", "rl-1", "evaluate-dpo", "evaluate-rl"]
    assert "dpo.beta" in json.dumps(changed["dpo"])


@pytest.mark.slow
def test_two_ranks_prefer_what_one_device_prefers(
    rollouts: Rollouts, preferring: Callable[..., Path], tmp_path: Path
) -> None:
    metrics: list[list[dict[str, Any]]] = []
    for processes in (1, 2):
        config = preferring(backend={"processes": processes}, rl=None)
        done = rollouts("run", config, "--json", "--store", tmp_path / f"store-{processes}")
        assert done.status == 0, done.err
        metrics.append(read_jsonl(Path(done.json()["report"]).parent / "dpo_metrics.jsonl"))
    for one, other in zip(*metrics, strict=True):
        for name in ("loss", "grad_norm", "rewards/margins"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5)
