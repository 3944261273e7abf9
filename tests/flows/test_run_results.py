"""The whole chain through the command line, as a user runs it, against a real Prefect server."""

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from rollouts_core.metrics.loggers import read_jsonl
from tests.conftest import Done
from tests.flows.test_run import states

STAGES = [
    "provision", "bootstrap", "tokenize", "sft", "serve", "rl-1", "rl-2",
    "evaluate-base", "evaluate-sft", "evaluate-rl", "sync", "report",
]  # fmt: skip
WITH_ARTIFACT = [name for name in STAGES if name not in ("provision", "serve", "sync", "report")]
SHOWN = {
    "tokenize": "tokenize", "sft": "sft", "rl-1": "rl 1/2", "rl-2": "rl 2/2", "bootstrap": "bootstrap",
    "evaluate-base": "evaluate base", "evaluate-sft": "evaluate sft", "evaluate-rl": "evaluate rl",
}  # fmt: skip
"""What Prefect calls a stage, behind the config's name."""

Rollouts = Callable[..., Done]


def prefect_states(server: str, flow_run_id: str) -> dict[str, tuple[str, str]]:
    """Task name to state name and type, as the Prefect UI would show them."""
    runs = post(server, "/task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run_id]}}})
    return {run["name"]: (run["state"]["name"], run["state"]["type"]) for run in runs}


def artifacts_of(server: str, flow_run_id: str) -> dict[str, str]:
    """What the run shows in Prefect's UI, by key, as text."""
    found = post(server, "/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [flow_run_id]}}, "limit": 100})
    return {artifact["key"]: str(artifact["data"]) for artifact in found}


def post(server: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        server + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_a_run_its_results_and_the_run_after_it(
    rollouts: Rollouts, config_file: Callable[..., Path], tmp_path: Path, prefect_server: str
) -> None:
    config = config_file()
    first = rollouts("run", config, "--json")
    assert first.status == 0, first.err
    record = first.json()
    assert (record["state"], list(states(record))) == ("Completed", STAGES)
    assert set(states(record).values()) == {"Completed"}, states(record)
    assert [entry["point"] for entry in record["accuracies"]] == ["base", "sft", "rl"]
    assert all(0 <= entry["low"] <= entry["accuracy"] <= entry["high"] <= 1 for entry in record["accuracies"])
    planned = {row["stage"]: row["key"] for row in rollouts("plan", config, "--json").json()}
    assert {stage["name"]: stage["key"] for stage in record["stages"] if stage["name"] in planned} == planned

    results = tmp_path / "outputs" / record["run_id"]
    assert record["report"] == str(results / "report.html")
    AutoModelForCausalLM.from_pretrained(results / "policy")
    rl = read_jsonl(results / "rl_metrics.jsonl")
    assert [line["step"] for line in rl] == [1, 2, 3, 4]
    assert max(line["sampling/sampling_logp_difference/mean"] for line in rl) < 1e-4
    sample = read_jsonl(results / "rollouts.jsonl")[0]
    assert len(sample["rollout_log_probs"]) == len(sample["weight_versions"])
    page = (results / "report.html").read_text()
    assert (results / "viewer" / "index.html").is_file()
    assert "after RL" in page
    assert not any(outside in page for outside in ("<script src", "<link", "<img", "@import"))
    assert set(prefect_states(prefect_server, record["flow_run_id"]).values()) == {
        ("Completed", "COMPLETED"),
        ("Embedded", "COMPLETED"),
    }
    logs = post(prefect_server, "/logs/filter", {"logs": {"flow_run_id": {"any_": [record["flow_run_id"]]}}})
    assert any("accuracy" in line["message"] for line in logs)
    shown = artifacts_of(prefect_server, record["flow_run_id"])
    assert {"plan", "sft-progress", "sft-metrics", "rl-2-progress", "rl-2-metrics", "rl-2-rollouts", "accuracy"} <= set(
        shown
    )
    assert "data:image/png;base64," in shown["rl-2-metrics"]
    assert "entropy" in shown["rl-2-metrics"]
    assert str(results / "viewer" / "index.html") in shown["report"]

    again = rollouts("run", config, "--json", "--quiet")
    assert (again.status, again.err) == (0, "")
    assert {states(again.json())[name] for name in WITH_ARTIFACT} == {"Cached"}
    assert again.json()["accuracies"] == record["accuracies"]
    shown = prefect_states(prefect_server, again.json()["flow_run_id"])
    assert {shown[f"small · {SHOWN[name]}"] for name in WITH_ARTIFACT} == {("Cached", "COMPLETED")}
    assert "to run" not in artifacts_of(prefect_server, again.json()["flow_run_id"])["plan"]

    listed = rollouts("runs")
    assert [line.split()[0] for line in listed.out.splitlines()] == [again.json()["run_id"], record["run_id"]]
    assert rollouts("show", record["run_id"], "--json").json() == record
    assert "after RL" in rollouts("show", record["run_id"]).out
    assert rollouts("show", "nothing").status == 1

    watched = rollouts("watch", record["run_id"])
    assert (watched.status, watched.err) == (0, "")
    assert "rl reward" in watched.out and "after RL" in watched.out
    told = [json.loads(line) for line in rollouts("watch", record["run_id"], "--json").out.splitlines()]
    assert [line["step"] for line in told if line["stage"].startswith("rl") and "reward" in line] == [1, 2, 3, 4]

    beside = rollouts("report", again.json()["run_id"], "--against", record["run_id"], "--json")
    assert beside.status == 0, beside.err
    page = Path(beside.json()["report"])
    assert page.name == f"report-against-{record['run_id']}.html"
    assert "(other)" in page.read_text()
    assert "no difference" in page.read_text()

    longer = rollouts("plan", config, "--set", "rl.steps=6", "--json").json()
    assert [row["stage"] for row in longer if row["state"] == "to run"] == ["rl-3", "evaluate-rl"]
    other = rollouts("plan", config, "--set", "seed=1", "--set", "sft.log_every=1", "--json").json()
    assert [row["stage"] for row in other if row["state"] == "cached"] == ["tokenize"]
