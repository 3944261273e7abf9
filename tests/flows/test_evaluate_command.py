"""`rollouts eval`: policies that are there, evaluated as asked, and nothing twice."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.metrics.loggers import read_jsonl
from tests.conftest import Done

Rollouts = Callable[..., Done]
ASKED = ("evaluation.samples_per_prompt=3", "evaluation.temperature=0.7", "evaluation.pass_at=[1,3]")
NO_TRAINING = ("--set", "sft=null", "--set", "rl=null")


def states(record: dict[str, Any]) -> dict[str, str]:
    return {stage["name"]: stage["state"] for stage in record["stages"]}


def test_what_is_there_is_evaluated_and_compared_with_a_run(
    rollouts: Rollouts, config_file: Callable[..., Path], tmp_path: Path
) -> None:
    """Nothing has been trained; several samples, slices, and an earlier run for a comparison."""
    config = config_file()
    first = rollouts("eval", config, "--json")
    assert first.status == 0, first.err
    assert [entry["point"] for entry in first.json()["accuracies"]] == ["base"]
    assert states(first.json())["evaluate-rl"] == "Pending"
    sets = [part for setting in (*ASKED, 'evaluation.slices=["answer"]') for part in ("--set", setting)]
    second = rollouts("eval", config, *sets, "--against", first.json()["run_id"], "--json")
    assert second.status == 0, second.err
    results = Path(second.json()["report"]).parent
    report = json.loads((results / "evaluation" / "base.json").read_text())
    lines = read_jsonl(results / "evaluation" / "base.jsonl")
    assert report["samples"] == len(lines) == 3 * report["prompts"]
    assert {line["sample"] for line in lines} == {0, 1, 2}
    assert report["pass_at"]["1"]["mean"] == pytest.approx(report["accuracy"]["mean"])
    assert report["pass_at"]["3"]["mean"] >= report["pass_at"]["1"]["mean"]
    page = (results / "report.html").read_text()
    assert f"before training of {first.json()['run_id']}" in page
    assert "Accuracy by answer" in page


@pytest.mark.slow
def test_a_policy_alone_and_compared_with_a_run(
    rollouts: Rollouts, config_file: Callable[..., Path], tmp_path: Path
) -> None:
    """What a run trained is not evaluated twice; and it may be evaluated as a model of its own."""
    config = config_file(rl=None, sft={"steps": 40})
    run = rollouts("run", config, "--json")
    assert run.status == 0, run.err
    trained = run.json()
    again = rollouts("eval", config, "--json")
    assert again.status == 0, again.err
    assert {name: state for name, state in states(again.json()).items() if name.startswith("evaluate")} == {
        "evaluate-base": "Cached",
        "evaluate-sft": "Cached",
    }
    assert again.json()["accuracies"] == trained["accuracies"]

    policy = Path(trained["report"]).parent / "policy"
    model = ("--set", "model.kind=pretrained", "--set", f"model.name={policy}", *NO_TRAINING)
    alone = rollouts("eval", config, *model, "--against", trained["run_id"], "--json")
    assert alone.status == 0, alone.err
    accuracies = {entry["point"]: entry["accuracy"] for entry in trained["accuracies"]}
    assert alone.json()["accuracies"][0]["accuracy"] == accuracies["sft"]
    assert not (Path(alone.json()["report"]).parent / "policy").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--set", "data.heldout=null"), "data.heldout: is required to evaluate"),
        (("--against", "nothing"), "no run nothing in the store"),
        (("--set", "evaluation.pass_at=[2]"), "pass_at 2 is not within 1 to samples_per_prompt 1"),
        (("--set", "evaluation.samples_per_prompt=2"), "greedy answers are all the same"),
        (("--set", "environment.name=nowhere:nothing"), "environment.name: environment 'nowhere:nothing': no module"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_starts(
    rollouts: Rollouts, config_file: Callable[..., Path], arguments: tuple[str, ...], told: str
) -> None:
    done = rollouts("eval", config_file(), *arguments)
    assert done.status == 1
    assert told in done.err


@pytest.mark.slow
def test_rows_that_cannot_be_scored_are_told_and_the_others_kept(
    rollouts: Rollouts, config_file: Callable[..., Path], addition: Path, tmp_path: Path
) -> None:
    rows = (addition / "heldout.jsonl").read_text().splitlines()
    unanswered = json.loads(rows[0]) | {"answer": None}
    del unanswered["answer"]
    (tmp_path / "heldout.jsonl").write_text("\n".join([json.dumps(unanswered), *rows[1:]]) + "\n")
    heldout = {"heldout": {"kind": "jsonl", "path": str(tmp_path / "heldout.jsonl")}}
    config = config_file(rl=None, sft={"steps": 5, "warmup_steps": 1}, data=heldout)
    lenient = rollouts("run", config, "--set", "evaluation.failures_allowed=0.2", "--json")
    assert lenient.status == 0, lenient.err
    report = json.loads((Path(lenient.json()["report"]).parent / "evaluation" / "sft.json").read_text())
    assert (report["failed"], report["prompts"]) == (1, len(rows) - 1)
    assert "not scored" in (Path(lenient.json()["report"])).read_text()
    strict = rollouts("eval", config, "--set", "evaluation.failures_allowed=0")
    assert strict.status == 1
    assert "1 of" in strict.err
    assert "row 0, sample 0: reward exact_match on source row 0" in strict.err


@pytest.mark.slow
def test_policies_are_evaluated_while_the_next_is_trained(
    rollouts: Rollouts, config_file: Callable[..., Path], tmp_path: Path
) -> None:
    config = config_file(rl={"steps": 6}, evaluation={"during_rl": True})
    done = rollouts("run", config, "--json")
    assert done.status == 0, done.err
    points = [entry["point"] for entry in done.json()["accuracies"]]
    assert points == ["base", "sft", "rl-1", "rl-2", "rl"]
    order = [
        (event["stage"], event["state"])
        for event in read_jsonl(next((tmp_path / ".rollouts" / "runs").glob("*/events.jsonl")))
        if "stage" in event
    ]
    assert order.index(("evaluate-rl-1", "Running")) < order.index(("rl-3", "Completed"))
    assert "after RL, segment 2" in Path(done.json()["report"]).read_text()
