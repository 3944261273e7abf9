"""How long the rollout viewer of 10,000 rollouts takes to open from disk: `python -m tests.benchmarks.viewer`.

Beside it, in turn, the same page of 100 rollouts: what ten thousand cost more than a few. Times are from navigation to
the first rollout drawn, and from a keystroke in the search to its list drawn; medians of several rounds.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser

from rollouts_core.observe.viewer import write_viewer
from tests.browser import running_browser

TOKENS = 500


def rollout(number: int) -> dict[str, Any]:
    draw = random.Random(number)
    pieces = [f" w{draw.randrange(1000)}" for _ in range(TOKENS)]
    text = "".join(pieces[50:])
    return {
        "step": 1 + number // 64, "group": number % 64 // 8, "sample": number % 8, "source_row": number,
        "prompt": "".join(pieces[:50]), "response": text, "answer": "x", "reward": draw.random(), "rewards": {},
        "status": "completed", "stop": None, "advantages": [draw.gauss(0, 1)] * (TOKENS - 50),
        "tokens": [draw.randrange(50_000) for _ in range(TOKENS)], "pieces": pieces,
        "rollout_log_probs": [-draw.random() for _ in range(TOKENS - 50)],
        "weight_versions": [number // 64] * (TOKENS - 50), "loss_mask": [0] * 50 + [1] * (TOKENS - 50),
        "messages": [{"role": "user", "content": "".join(pieces[:50])}, {"role": "assistant", "content": text}],
    }  # fmt: skip


def write_results(directory: Path, count: int) -> Path:
    directory.mkdir()
    with (directory / "rollouts.jsonl").open("w") as file:
        file.writelines(json.dumps(rollout(number)) + "\n" for number in range(count))
    page = write_viewer(directory, "a-run")
    assert page is not None
    return page


def measure(browser: Browser, page: Path) -> tuple[float, float]:
    """Milliseconds to the first rollout, and of one search."""
    opened = browser.new_page()
    began = time.perf_counter()
    opened.goto(page.as_uri())
    opened.wait_for_selector("#detail article")
    loaded = time.perf_counter()
    searching = opened.evaluate(
        """() => {
          const box = document.querySelector('[name=text]'), began = performance.now();
          box.value = 'w77';
          box.dispatchEvent(new Event('input', { bubbles: true }));
          return performance.now() - began;
        }"""
    )
    opened.close()
    return 1000 * (loaded - began), float(searching)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as scratch, running_browser() as browser:
        began = time.perf_counter()
        pages = {count: write_results(Path(scratch) / str(count), count) for count in (100, 10_000)}
        written = time.perf_counter() - began
        times: dict[int, list[tuple[float, float]]] = {count: [] for count in pages}
        for _ in range(rounds):
            for count, page in pages.items():
                times[count].append(measure(browser, page))
        size = sum(path.stat().st_size for path in (Path(scratch) / "10000" / "viewer").rglob("*")) / 1e6
    print(f"10,000 rollouts of {TOKENS} tokens: {size:.0f} MB, generated and written in {written:.1f} s")
    for count, measured in times.items():
        loaded, searched = (statistics.median(column) for column in zip(*measured, strict=True))
        print(f"{count:>6} rollouts: first rollout after {loaded:.0f} ms, a search {searched:.1f} ms")


if __name__ == "__main__":
    main()
