"""What a plan and a fully cached flow cost: `make benchmark`. Nothing here asserts on time."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.config.loading import from_data
from tests.benchmarks.timing import alternately, report

pytestmark = pytest.mark.benchmark

ROOT = Path(__file__).parents[2]
IN_PROCESS = """
import json, sys, time, statistics
from pathlib import Path
from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from flows.post_train import post_train
from rollouts_core.config.loading import load_config

config = load_config(Path(sys.argv[1]))
stages = len(post_train(config).stages)

@task(cache_policy=NO_CACHE, persist_result=False)
def nothing(number): return number

@flow(persist_result=False)
def as_many():
    for number in range(stages): nothing(number)

times = {"cached": [], "no-op": []}
for turn in range(8):
    for name, run in (("cached", lambda: post_train(config)), ("no-op", as_many)):
        began = time.perf_counter()
        run()
        if turn: times[name].append(time.perf_counter() - began)
print(json.dumps({"stages": stages, **{name: statistics.median(values) for name, values in times.items()}}))
"""


def test_plan_of_the_default_config(tmp_path: Path) -> None:
    """The whole process, beside an interpreter that only imports pydantic."""
    command = [sys.executable, "-m", "flows.cli", "plan", str(ROOT / "configs" / "arithmetic.py")]
    bare = [sys.executable, "-c", "import pydantic.dataclasses"]

    def run(arguments: list[str]) -> None:
        subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)

    report("rollouts plan", *_between(alternately(lambda: run(command), lambda: run(bare)), "import pydantic alone"))


def test_a_fully_cached_flow_beside_as_many_tasks_that_do_nothing(
    small_config: dict[str, Any], tmp_path: Path, prefect_server: str
) -> None:
    path = tmp_path / "config.json"
    small_config["store"] = {"path": str(tmp_path / "store")}
    from_data(small_config)
    path.write_text(json.dumps(small_config))
    environment = {**os.environ, "PREFECT_API_URL": prefect_server, "PREFECT_LOGGING_LEVEL": "WARNING"}
    done = subprocess.run(
        [sys.executable, "-c", IN_PROCESS, str(path)],
        env=environment, cwd=tmp_path, check=True, capture_output=True, text=True,
    )  # fmt: skip
    medians = json.loads(done.stdout.splitlines()[-1])
    report(f"a cached flow of {medians['stages']} stages", medians["cached"], "as many no-ops", medians["no-op"])


def _between(seconds: tuple[float, float], name: str) -> tuple[float, str, float]:
    return seconds[0], name, seconds[1]
