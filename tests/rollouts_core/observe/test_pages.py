"""The report and the rollout viewer in a real browser, opened from disk."""

import json
import math
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from rollouts_core.config import PipelineConfig
from rollouts_core.config.loading import from_data, to_data
from rollouts_core.metrics.loggers import JSONLLogger
from rollouts_core.observe import viewer as viewer_module
from rollouts_core.observe.assets import asset
from rollouts_core.observe.evaluations import compare_in_order, read_evaluations
from rollouts_core.observe.report import Against, write_report
from rollouts_core.observe.run_records import AccuracyRecord
from rollouts_core.observe.runs import open_run
from rollouts_core.observe.viewer import Viewer, write_viewer
from rollouts_core.store.local import LocalStore
from tests.addition import MODEL
from tests.browser import Scheme, keep, open_page, running_browser
from tests.rollouts_core.observe.test_observe import write_results

COUNT = 10_000
GROUP = 8
PER_STEP = 80


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def viewer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of ten thousand rollouts: groups of eight, rewards of 0 and 1, every fourth with a tool."""
    results = tmp_path_factory.mktemp("results")
    with (results / "rollouts.jsonl").open("w") as file:
        file.writelines(json.dumps(rollout(number)) + "\n" for number in range(COUNT))
    page = write_viewer(results, "a-run")
    assert page is not None
    return page


def rollout(number: int) -> dict[str, Any]:
    draw = random.Random(number)
    pieces = ["What is ", "6*7", "?", " Let me", " see", ".", "<call>", "42", "</call>", " It is ", "42", "."]
    mask = [0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1]
    calls = number % 4 == 0
    reward = float(draw.random() < 0.3 + 0.6 * number / COUNT)
    call = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": "6*7"}}}
    tool = [{"role": "assistant", "content": "Let me see.", "tool_calls": [call]}, {"role": "tool", "content": "42"}]
    asked, said = {"role": "user", "content": "What is 6*7?"}, {"role": "assistant", "content": f"It is {number}."}
    return {
        "step": 1 + number // PER_STEP, "group": number % PER_STEP // GROUP, "sample": number % GROUP,
        "source_row": number, "prompt": "What is 6*7?", "response": f"It is {number}.", "answer": "42",
        "reward": reward, "rewards": {"form": 1.0}, "status": "completed", "stop": "tool" if calls else "answered",
        "advantages": [(1.0 if reward else -1.0)] * sum(mask), "tokens": list(range(12)), "pieces": pieces,
        "rollout_log_probs": [-draw.random() * 4 * kept for kept in mask[3:]],
        "weight_versions": [number // PER_STEP] * 9,
        "loss_mask": mask, "messages": [asked, *(tool if calls else []), said],
    }  # fmt: skip


def watched(browser: Browser, path: Path, scheme: Scheme = "light", width: int = 1300) -> tuple[Page, list[str]]:
    """The page, and what went wrong on it or would leave this machine."""
    wrong: list[str] = []
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    page = context.new_page()
    page.on("request", lambda request: wrong.append(request.url) if not request.url.startswith("file:") else None)
    page.on("requestfailed", lambda request: wrong.append(f"failed: {request.url}"))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.goto(path.as_uri())
    return page, wrong


def test_ten_thousand_rollouts_are_listed_and_few_are_drawn(browser: Browser, viewer: Path) -> None:
    page, wrong = watched(browser, viewer)
    expect(page.locator("#count")).to_have_text("10,000 of 10,000 rollouts")
    expect(page.locator("#detail article")).to_contain_text("It is 0.")
    assert page.locator(".row").count() < 40
    page.locator("#list").evaluate("list => { list.scrollTop = list.scrollHeight; }")
    page.locator(".row", has_text="It is 9999.").click()
    expect(page.locator("#detail article")).to_contain_text("Step 125, group 9, sample 7")
    assert page.url.endswith("#9999")
    page.keyboard.press("ArrowUp")
    expect(page.locator("#detail article")).to_contain_text("It is 9998.")
    assert wrong == []


def test_filters_narrow_the_list(browser: Browser, viewer: Path) -> None:
    page, wrong = watched(browser, viewer)
    count = page.locator("#count")
    page.fill("[name=step-low]", "3")
    page.fill("[name=step-high]", "4")
    expect(count).to_have_text("160 of 10,000 rollouts")
    page.fill("[name=group]", "2")
    expect(count).to_have_text("16 of 10,000 rollouts")
    page.select_option("[name=stop]", "tool")
    expect(count).to_have_text("4 of 10,000 rollouts")
    page.click("button[type=reset]")
    expect(count).to_have_text("10,000 of 10,000 rollouts")
    page.fill("[name=text]", "it is 123.")
    expect(count).to_have_text("1 of 10,000 rollouts")
    page.fill("[name=text]", "")
    right = sum(rollout(number)["reward"] for number in range(COUNT))
    page.fill("[name=reward-low]", "0.5")
    expect(count).to_have_text(f"{right:,.0f} of 10,000 rollouts")
    page.click("button[type=reset]")
    page.select_option("[name=order]", "low")
    expect(page.locator(".row .reward").first).to_have_text("0")
    assert wrong == []


def test_tokens_are_coloured_by_what_is_asked(browser: Browser, viewer: Path) -> None:
    page, wrong = watched(browser, viewer)
    page.check("[name=view][value=tokens]")
    tokens = page.locator(".tokens")
    expect(tokens).to_have_text("".join(rollout(0)["pieces"]))
    expect(tokens.locator(".observed")).to_have_text("42</call>")
    expect(tokens.locator(".given")).to_have_text("What is 6*7?")
    colours = {}
    for colour in ("logprob", "advantage", "mask", "none"):
        page.select_option("#colour", colour)
        learnt = tokens.locator(".learnt > span").evaluate_all("all => all.map(token => token.style.background)")
        given = tokens.locator(".given > span").evaluate_all("all => all.map(token => token.style.background)")
        colours[colour] = (learnt, given)
    assert len(set(colours["logprob"][0])) > 2, "tokens of unlike probabilities look unlike"
    assert set(colours["logprob"][1]) == {""}
    assert len(set(colours["advantage"][0])) == 1
    assert set(colours["mask"][0]).isdisjoint(colours["mask"][1])
    assert set(colours["none"][0]) == {""}
    title = tokens.locator(".learnt > span").first.get_attribute("title") or ""
    assert "log-probability" in title
    assert "weight version 0" in title
    assert wrong == []


def test_calls_and_observations_are_set_apart_and_a_group_stands_side_by_side(browser: Browser, viewer: Path) -> None:
    page, wrong = watched(browser, viewer)
    expect(page.locator(".call")).to_have_text('calculate({"expression":"6*7"})')
    expect(page.locator(".message.tool")).to_contain_text("42")
    page.check("#side")
    expect(page.locator("#detail article")).to_have_count(GROUP)
    tops = page.locator("#detail article").evaluate_all("all => all.map(one => one.getBoundingClientRect().top)")
    assert len(set(tops)) == 1
    keep(page, "viewer-group", whole=False)
    assert wrong == []


def test_a_viewer_that_is_served_follows_the_run(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is looked at, and the filters, stay as they are; one opened from disk is left alone."""
    script = asset("viewer.js").replace("const FOLLOW_SECONDS = 10;", "const FOLLOW_SECONDS = 0.2;")
    assert script != asset("viewer.js")
    monkeypatch.setattr(viewer_module, "asset", lambda name: script if name == "viewer.js" else asset(name))
    viewer = Viewer(tmp_path, "a-run")
    for number in range(20):
        viewer.add(rollout(number))
    assert viewer.write(live=True)
    with serving(tmp_path) as address:
        page = browser.new_page()
        page.goto(f"{address}/viewer/index.html#3")
        page.wait_for_selector("#detail article")
        page.fill("[name=step-high]", "2")
        shown = page.inner_text("#detail")
        for number in range(20, 120):
            viewer.add(rollout(number))
        assert viewer.write(live=True)
        page.wait_for_function("document.getElementById('count').textContent.includes('of 120')")
        assert "running" in page.inner_text("#run")
        assert page.input_value("[name=step-high]") == "2" and page.inner_text("#detail") == shown
        page.fill("[name=step-high]", "")
        page.evaluate("choose(45)")
        page.wait_for_function("document.getElementById('detail').textContent.includes('It is 45.')")
        assert viewer.write(live=False)
        page.wait_for_function("!document.getElementById('run').textContent.includes('running')")
        page.close()


@contextmanager
def serving(directory: Path) -> Iterator[str]:
    handler = partial(SimpleHTTPRequestHandler, directory=str(directory))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(server.serve_forever)
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_a_long_answer_s_tokens_are_drawn(browser: Browser, tmp_path: Path) -> None:
    long = 16_000
    parts = {
        "pieces": [" a"] * long, "tokens": [7] * long, "loss_mask": [1] * long, "advantages": [0.5] * long,
        "rollout_log_probs": [-0.5] * long, "weight_versions": [3] * long,
    }  # fmt: skip
    with (tmp_path / "rollouts.jsonl").open("w") as file:
        file.writelines(json.dumps({**rollout(number), **parts}) + "\n" for number in range(6))
    viewer = write_viewer(tmp_path, "a-run")
    assert viewer is not None
    page, wrong = watched(browser, viewer)
    page.check("[name=view][value=tokens]")
    page.wait_for_function("document.querySelectorAll('#detail .learnt span').length === 16000")
    assert not wrong
    page.close()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1300), ("dark", 1300), ("light", 390)])
def test_the_viewer_looks_well(browser: Browser, viewer: Path, scheme: Scheme, width: int) -> None:
    page, wrong = watched(browser, viewer, scheme, width)
    page.check("[name=view][value=tokens]")
    expect(page.locator(".tokens")).to_be_visible()
    keep(page, f"viewer-{scheme}-{width}", whole=False)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert wrong == []


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, addition: Path) -> Path:
    """Beside another run."""
    directory = tmp_path_factory.mktemp("report")
    data = {
        "name": "a-run", "model": dict(MODEL), "evaluation": {"max_new_tokens": 3},
        "data": {
            "max_length": 12,
            **{name: {"kind": "jsonl", "path": str(addition / f"{name}.jsonl")}
               for name in ("demonstrations", "prompts", "heldout")},
        },
        "sft": {"steps": 20}, "rl": {"steps": 60, "max_new_tokens": 3},
    }  # fmt: skip
    config: PipelineConfig = from_data(data)
    run = open_run(LocalStore(directory), config, [(name, "k" * 64) for name in ("tokenize", "sft", "rl-1")], None)
    for seconds, name in enumerate(("tokenize", "sft", "rl-1")):
        run.stage(name, "k" * 64, "Cached" if name == "tokenize" else "Completed", 0.2 + 30.0 * seconds)
    points = ("base", "sft", "rl")
    accuracies = tuple(AccuracyRecord(point, 0.3 * i, 0.3 * i, 0.3 * i + 0.05, 20) for i, point in enumerate(points))
    for place in ("here", "there"):
        (directory / place).mkdir()
        write_results(directory / place, points)
        (directory / place / "rl_metrics.jsonl").unlink()
        log = JSONLLogger(directory / place / "rl_metrics.jsonl")
        for step in range(1, 61):
            log.log(training_metrics(step, 0.1 if place == "here" else 0.05), step)
    (directory / "here" / "rollouts.jsonl").write_text(json.dumps(rollout(0)) + "\n")
    write_viewer(directory / "here", run.run_id)
    return write_report(
        replace(run.record, accuracies=accuracies),
        directory / "here",
        to_data(config),
        read_evaluations(directory / "here", points),
        compare_in_order(directory / "here", points),
        Against("another-run", directory / "there", [("rl.steps", "60", "30")]),
    )


def training_metrics(step: int, pace: float) -> dict[str, float]:
    reward = 1 - math.exp(-pace * step)
    return {
        "reward": reward, "reward_std": 0.3 * (1 - reward), "entropy": 2 - 1.8 * reward, "policy_loss": -0.1 * pace,
        "kl": 0.01 * reward, "completions/mean_length": 40 + 20 * reward, "completions/max_length": 90.0,
        "sampling/sampling_logp_difference/mean": 1e-6, "sampling/sampling_logp_difference/max": 1e-5,
        "num_tokens": 4000.0, "timing_s/gen": 1.2, "timing_s/update_actor": 0.6, "timing_s/adv": 0.01,
        "timing_s/unaccounted": 0.02, "timing_s/step": 1.83,
    }  # fmt: skip


@pytest.mark.parametrize(("scheme", "width"), [("light", 1300), ("dark", 1300), ("light", 390)])
def test_the_report_draws_its_charts_and_fits(browser: Browser, report: Path, scheme: Scheme, width: int) -> None:
    page, wrong = watched(browser, report, scheme, width)
    expect(page.locator("#plots canvas")).to_have_count(len(json.loads(page.locator("#charts").inner_text() or "[]")))
    assert page.locator("#plots canvas").count() >= 8
    expect(page.locator("body")).to_contain_text("RL: KL to where RL began")
    expect(page.locator("body")).to_contain_text("tokenize (cached)")
    expect(page.locator("body")).to_contain_text("Config beside another-run")
    keep(page, f"report-{scheme}-{width}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert wrong == []


def test_the_report_leads_to_the_rollouts_and_back(browser: Browser, report: Path) -> None:
    page = open_page(browser, report.as_uri())
    page.get_by_role("link", name="Look at the rollouts").click()
    expect(page.locator("#count")).to_have_text("1 of 1 rollouts")


def test_charts_are_drawn_again_when_the_colours_change(browser: Browser, report: Path) -> None:
    page, wrong = watched(browser, report)
    before = page.locator("#plots canvas").first.evaluate("canvas => canvas.toDataURL()")
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("light => document.querySelector('#plots canvas').toDataURL() !== light", arg=before)
    assert wrong == []
