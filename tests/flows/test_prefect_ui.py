"""What our users do by clicking: `rollouts up`, and a real browser in Prefect's UI, with a real server and worker."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from infra.host.system import free_port
from tests.addition import MODEL
from tests.browser import keep, open_page, running_browser
from tests.conftest import until

pytestmark = pytest.mark.slow

DEADLINE = 150.0
REWARD = """
from pathlib import Path

def score(sample):
    if Path({flag!r}).exists():
        raise RuntimeError("the reward's service is out of order")
    return float(sample.response.strip() == sample.prompt.metadata["answer"])
"""


@dataclass(frozen=True)
class Up:
    """A running `rollouts up`."""

    process: "subprocess.Popen[str]"
    url: str
    pages: str
    folder: Path

    def call(self, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/api{path}", data, headers, method=method)
        return until(lambda: _answered(request), path)[0]

    def runs(self, deployment: str) -> list[dict[str, Any]]:
        """Of a deployment, the latest first."""
        chosen = {"deployments": {"name": {"any_": [deployment]}}, "sort": "EXPECTED_START_TIME_DESC"}
        found: list[dict[str, Any]] = self.call("/flow_runs/filter", chosen)
        return found

    def tasks(self, run: str) -> dict[str, str]:
        """The state of each task of a run, as the UI names both; of its last attempt, where it was retried."""
        found = self.call("/task_runs/filter", {"task_runs": {"flow_run_id": {"any_": [run]}}})
        return {task["name"]: task["state_name"] for task in sorted(found, key=lambda of: of["flow_run_run_count"])}

    def wait(self, run: str, state: str) -> dict[str, Any]:
        def there() -> dict[str, Any] | None:
            now: dict[str, Any] = self.call(f"/flow_runs/{run}")
            ended = now["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
            assert not ended or now["state_type"] == state, now["state"]
            return now if ended else None

        return until(there, f"{state} of the run")  # type: ignore[no-any-return]


def _answered(request: urllib.request.Request) -> tuple[Any] | None:
    """None where the server's SQLite is locked, which it says at once, and Prefect's clients ask again."""
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return (json.loads(answer.read() or b"null"),)
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        return None


@pytest.fixture(scope="module")
def flag(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there, the reward of `failing` is out of order."""
    return tmp_path_factory.mktemp("flag") / "out-of-order"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, addition: Path, flag: Path) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("project")
    (folder / "configs").mkdir()
    (folder / "reward.py").write_text(REWARD.format(flag=str(flag)))
    files = {name: {"kind": "jsonl", "path": str(addition / f"{name}.jsonl")} for name in ("demonstrations", "prompts")}
    base: dict[str, Any] = {
        "model": dict(MODEL), "evaluation": {"max_new_tokens": 3}, "sft": {"steps": 20, "batch_size": 8},
        "data": {"max_length": 12, **files},
        "rl": {
            "steps": 4, "steps_per_segment": 2, "batch_size": 4, "n_samples_per_prompt": 4, "max_new_tokens": 3,
            "checkpoint_every": 1,
        },
    }  # fmt: skip
    heldout = {**base["data"], "heldout": {"kind": "jsonl", "path": str(addition / "heldout.jsonl")}}
    configs = {
        "tiny": {**base, "data": heldout},
        "failing": {**base, "rl": {**base["rl"], "reward": f"{folder / 'reward.py'}:score"}},
        "long": {**base, "rl": {**base["rl"], "steps": 10**6, "steps_per_segment": 10**6}},
    }
    for name, config in configs.items():
        (folder / "configs" / f"{name}.json").write_text(json.dumps({"name": name, **config}))
    environment = {
        **os.environ,
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2",
        "ROLLOUTS_MACHINES": str(folder / "machines.toml"),
    }
    (folder / "machines.toml").write_text('[gpu1]\nhost = "10.0.0.5"\ngpus = 4\n')
    environment.pop("PREFECT_API_URL", None)
    command = [sys.executable, "-m", "flows.cli", "up", "--json", "--port", str(free_port())]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        told = json.loads(process.stdout.readline())
        yield Up(process, told["url"], told["pages"], folder)
    finally:
        press_ctrl_c(process)


def press_ctrl_c(process: "subprocess.Popen[str]") -> int:
    """As a terminal does: everything in the foreground is told."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    return process.wait(DEADLINE)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


def deployment_page(browser: Browser, up: Up, name: str) -> Page:
    page = open_page(browser, f"{up.url}/v2/deployments", height=1000)
    page.get_by_role("link", name=name, exact=True).first.click()
    expect(page.get_by_role("button", name="Run", exact=True)).to_be_visible()
    return page


def run_page(browser: Browser, up: Up, run: str) -> Page:
    page = open_page(browser, f"{up.url}/v2/runs/flow-run/{run}", height=1000)
    expect(page.get_by_role("tab", name="Task Runs")).to_be_visible()
    return page


def submit(page: Page) -> dict[str, Any]:
    """The run that a filled-in form makes."""

    def sent() -> tuple[dict[str, Any]] | None:
        with page.expect_response("**/create_flow_run") as answer:
            page.get_by_role("button", name="Submit").click()
        assert answer.value.status in (201, 503), answer.value.text()
        return (answer.value.json(),) if answer.value.status == 201 else None

    run: dict[str, Any] = until(sent, "the form to be taken")[0]
    return run


def choose_in_menu(page: Page, item: str, answer: str) -> None:
    """From the menu of a run, with its question answered."""
    page.locator("[aria-haspopup=menu]").last.click()
    page.get_by_role("menuitem", name=item, exact=True).click()
    page.get_by_role("button", name=answer, exact=True).last.click()


def test_deployments_say_what_they_are(up: Up, browser: Browser) -> None:
    found = {entry["name"]: entry for entry in up.call("/deployments/filter", {})}
    assert set(found) == {"tiny", "failing", "long", "evaluate", "gc"}
    assert found["tiny"]["description"].startswith("SFT, DPO, then RL")
    assert found["tiny"]["tags"] == ["rollouts", "post-train", "local"]
    queues = {queue["name"]: queue for queue in up.call("/work_pools/rollouts/queues/filter", {})}
    assert queues["gpu1"]["concurrency_limit"] == 4
    page = open_page(browser, f"{up.url}/v2/deployments")
    expect(page.get_by_role("link", name="evaluate", exact=True).first).to_be_visible()
    keep(page, "ui-deployments")


def test_a_run_is_started_from_the_form_and_shows_itself(up: Up, browser: Browser) -> None:
    page = deployment_page(browser, up, "tiny")
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Custom run").click()
    seed = page.get_by_label("seed (Optional)")
    seed.fill("-1")
    keep(page, "ui-form", whole=False)
    page.get_by_role("button", name="Submit").click()
    assert "0" in seed.evaluate("field => field.validationMessage")
    keep(page, "ui-form-refused", whole=False)
    assert up.runs("tiny") == []
    seed.fill("3")
    page.get_by_role("tab", name="DPOConfig").click()
    expect(page.get_by_role("tab", name="DPOConfig")).to_have_attribute("aria-selected", "true")
    page.get_by_role("tab", name="DPOConfig").locator("xpath=following-sibling::button").click()
    page.get_by_role("tab", name="GSPO").click()
    expect(page.get_by_role("tab", name="GSPO")).to_have_attribute("aria-selected", "true")
    run = submit(page)
    config = run["parameters"]["config"]
    assert (config["seed"], config["rl"]["algorithm"]["kind"], config["dpo"]) == (3, "gspo", None)
    up.wait(run["id"], "COMPLETED")
    names = up.tasks(run["id"])
    assert {"tiny · tokenize", "tiny · sft", "tiny · rl 1/2", "tiny · rl 2/2", "tiny · evaluate rl"} <= set(names)
    page = run_page(browser, up, run["id"])
    expect(page.get_by_text("Completed").first).to_be_visible()
    keep(page, "ui-run")
    dark = open_page(browser, page.url, "dark", height=1000)
    expect(dark.get_by_text("Completed").first).to_be_visible()
    keep(dark, "ui-run-dark")
    page.get_by_role("tab", name="Artifacts").click()
    expect(page.get_by_text("rl-2-metrics").first).to_be_visible()
    keep(page, "ui-run-artifacts")
    _look_at_artifacts(up, browser, run["id"])


def _look_at_artifacts(up: Up, browser: Browser, run: str) -> None:
    found = up.call("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}, "limit": 100})
    by_key = {artifact["key"]: artifact for artifact in found}
    for key, words in {
        "plan": "no artifact of this kind",
        "rl-2-metrics": "entropy",
        "rl-2-rollouts": "reward",
    }.items():
        page = open_page(browser, f"{up.url}/v2/artifacts/artifact/{by_key[key]['id']}", height=1000)
        expect(page.get_by_text(re.compile(words)).first).to_be_visible()
        keep(page, f"ui-artifact-{key}", whole=False)
    page = open_page(browser, f"{up.url}/v2/artifacts/artifact/{by_key['report']['id']}")
    link = page.get_by_role("link", name="Report", exact=True)
    assert (link.get_attribute("href") or "").startswith(up.pages)
    page.goto(link.get_attribute("href") or "")
    expect(page.get_by_role("heading", name="Held-out accuracy")).to_be_visible()


def test_a_failed_stage_says_why_and_retry_goes_on_from_it(up: Up, browser: Browser, flag: Path) -> None:
    flag.write_text("")
    run = _start(up, "failing")
    up.wait(run, "FAILED")
    page = run_page(browser, up, run)
    page.get_by_role("tab", name="Logs").click()
    page.get_by_role("combobox", name="log sort order").click()
    page.get_by_role("option", name="Newest to oldest").click()
    expect(page.get_by_text("the reward's service is out of order").first).to_be_visible()
    expect(page.get_by_text("what to do").first).to_be_visible()
    keep(page, "ui-failed")
    page.get_by_role("tab", name="Artifacts").click()
    expect(page.get_by_text("rl-1 failed")).to_be_visible()
    flag.unlink()
    choose_in_menu(page, "Retry", "Retry")
    until(lambda: up.call(f"/flow_runs/{run}")["state_type"] != "FAILED", "the retry")
    up.wait(run, "COMPLETED")
    states = up.tasks(run)
    assert {states[f"failing · {stage}"] for stage in ("tokenize", "sft")} == {"Cached"}, states
    assert states["failing · rl 2/2"] == "Completed"
    page = run_page(browser, up, run)
    page.get_by_role("tab", name="Task Runs").click()
    expect(page.get_by_text("Cached").first).to_be_visible()
    keep(page, "ui-retried")


def test_a_finished_run_starts_again_from_a_stage(up: Up, browser: Browser) -> None:
    page = deployment_page(browser, up, "failing")
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Custom run").click()
    page.get_by_role("button", name="Select start_again_from").click()
    keep(page, "ui-start-again", whole=False)
    page.get_by_role("option", name="rl", exact=True).click()
    page.keyboard.press("Escape")
    run = submit(page)
    assert run["parameters"]["start_again_from"] == ["rl"]
    up.wait(run["id"], "COMPLETED")
    states = up.tasks(run["id"])
    assert (states["failing · sft"], states["failing · rl 1/2"]) == ("Cached", "Completed")


def test_cancelling_in_rl_leaves_no_process(up: Up, browser: Browser) -> None:
    run = _start(up, "long")
    until(lambda: list((up.folder / ".rollouts" / "jobs").glob("rl-1-*/metrics.jsonl")), "RL's first steps")
    page = run_page(browser, up, run)
    expect(page.get_by_text("Running").first).to_be_visible()
    keep(page, "ui-running")
    choose_in_menu(page, "Cancel", "Cancel Flow Run")
    up.wait(run, "CANCELLED")
    until(lambda: not _processes(str(up.folder / ".rollouts" / "jobs")), "the end of its processes")
    logs = up.call("/logs/filter", {"logs": {"flow_run_id": {"any_": [run]}}, "limit": 200})
    assert any("ended job rl-1" in line["message"] for line in logs)
    (record,) = [json.loads(path.read_text()) for path in (up.folder / ".rollouts" / "runs").glob("long-*/run.json")]
    assert record["state"] == "Cancelled"
    assert not list((up.folder / ".rollouts" / "artifacts").glob("leases/*"))


def test_a_schedule_fires(up: Up, browser: Browser) -> None:
    page = deployment_page(browser, up, "gc")
    page.get_by_role("button", name="Schedule", exact=True).click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("tab", name="Cron").click()
    dialog.locator("[name='schedule.cron']").fill("* * * * *")
    keep(page, "ui-schedule", whole=False)
    until(lambda: _saved(page), "the schedule to be taken")
    fired = until(lambda: [run for run in up.runs("gc") if run["start_time"]], "the schedule")
    assert fired[0]["auto_scheduled"]
    deployment = up.call("/deployments/name/gc/gc")
    assert fired[0]["parameters"]["store"] == deployment["parameters"]["store"]
    assert fired[0]["parameters"]["dry_run"]
    up.wait(fired[0]["id"], "COMPLETED")
    up.call(f"/deployments/{deployment['id']}/schedules/{deployment['schedules'][0]['id']}", method="DELETE")


def _saved(page: Page) -> bool:
    """Whether the server took the schedule; as in `_answered`, it may be asked to do so again."""
    with page.expect_response(re.compile("/schedules$")) as answer:
        page.get_by_role("dialog").get_by_role("button", name="Save").click()
    return bool(answer.value.status == 201)


def test_a_run_in_another_terminal_reports_there(up: Up) -> None:
    environment = {**os.environ, "PREFECT_HOME": str(up.folder / "prefect")}
    environment.pop("PREFECT_API_URL", None)
    command = [sys.executable, "-m", "flows.cli", "run", "configs/tiny.json", "--json"]
    done = subprocess.run(command, cwd=up.folder, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert up.call(f"/flow_runs/{record['flow_run_id']}")["state_type"] == "COMPLETED"
    assert not (up.folder / "prefect" / "rollouts-server.log").exists()


def test_what_is_up_goes_with_its_runs(up: Up) -> None:
    _start(up, "long")
    jobs = str(up.folder / ".rollouts" / "jobs")
    until(lambda: _processes(jobs), "RL's process")
    assert press_ctrl_c(up.process) == 130
    until(lambda: not _processes(jobs), "the end of its processes")
    assert not _processes(up.url.rpartition(":")[2])


def _start(up: Up, deployment: str) -> str:
    found = up.call(f"/deployments/name/post-train/{deployment}")
    run = up.call(f"/deployments/{found['id']}/create_flow_run", {"state": {"type": "SCHEDULED"}})
    return str(run["id"])


def _processes(argument: str) -> list[int]:
    """Those that have this in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().decode() if entry.name.isdigit() else ""
        except OSError:
            continue
        if argument in command:
            found.append(int(entry.name))
    return found
