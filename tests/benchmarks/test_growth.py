"""What commands cost in a store that has been used for a year: `make benchmark`. Nothing here asserts on time.

The store has the artifacts of one plan and one run of it, and copies under other keys and ids: half of the artifacts
are SFT's, half RL's, each with one field of its own. "First" is the first question after all that was copied in, "then"
the median of those that follow.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.config.loading import load_config
from rollouts_core.observe.run_records import encode_record
from rollouts_core.observe.runs import open_run
from rollouts_core.stages.plan import plan
from rollouts_core.store.manifest import FILES, MANIFEST, Manifest, encode_manifest
from rollouts_core.store.remote import RemoteStore
from rollouts_core.store.store import Store, open_store
from tests.rollouts_core.stages.test_explain import publish

pytestmark = pytest.mark.benchmark
SIZES = (10, 100, 1000, 10_000)
ROUNDS = 3
LATER = "2027-01-01T00:00:00+00:00"


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_what_commands_cost(
    kind: str, config_file: Callable[..., Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue("s3_url") if kind == "s3" else None
    path = config_file(store={"path": str(tmp_path / ".rollouts"), "url": url})
    store, config = open_store(tmp_path / ".rollouts", url), load_config(path)
    stages = plan(config).stages
    for stage in stages:
        publish(store, stage)  # type: ignore[arg-type]
    run = open_run(store, config, [(stage.name, stage.key) for stage in stages], None)
    run.end("Completed")
    sft = next(stage.artifact.directory for stage in stages if stage.name == "sft")
    there = 0
    commands = {
        "plan": ["plan", str(path), "--set", "sft.learning_rate=0.1", "--json"],
        "runs": ["runs", "--json", "--store", str(url or store.home)],
        "show": ["show", run.run_id, "--json", "--store", str(url or store.home)],
        "lineage": ["lineage", sft, "--json", "--store", str(url or store.home)],
        "gc --dry-run": ["gc", "--dry-run", "--json", "--store", str(url or store.home)],
    }
    print(f"\n| {kind}: artifacts and runs | {' | '.join(f'{name}, first and then, s' for name in commands)} |")
    print("|---" * (1 + len(commands)) + "|")
    for size in SIZES:
        _fill(store, [store.manifest(s.artifact) for s in stages if s.name in ("sft", "rl-1")], there, size)
        for number in range(there, size):
            _copy_run(store.home, replace(run.record, run_id=f"copy-{number:05d}", started_at=LATER), number)
        there = size
        told = [_timed(command, tmp_path) for command in commands.values()]
        print(f"| {size:,} | {' | '.join(told)} |", flush=True)


def _fill(store: Store, originals: Sequence[Manifest], begin: int, end: int) -> None:
    for number in range(begin, end):
        made = originals[number % len(originals)]
        spec: dict[str, Any] = json.loads(json.dumps(made.provenance.spec))
        spec["training"]["learning_rate"] = number + 1.0
        artifact = replace(made.artifact, key=f"{number:064x}"[::-1])
        copied = replace(made, artifact=artifact, provenance=replace(made.provenance, spec=spec))
        if isinstance(store, RemoteStore):
            store.objects.write(f"artifacts/{artifact.directory}/{MANIFEST}", encode_manifest(copied))
        else:
            directory = store.home / "artifacts" / artifact.directory
            (directory / FILES).mkdir(parents=True)
            (directory / MANIFEST).write_bytes(encode_manifest(copied))
    if isinstance(store, RemoteStore):
        (store.home / "index.sqlite").unlink(missing_ok=True)  # copied in behind the journal's back


def _copy_run(home: Path, record: Any, number: int) -> None:
    directory = home / "runs" / record.run_id
    directory.mkdir(parents=True)
    (directory / "run.json").write_bytes(encode_record(record))


def _timed(command: Sequence[str], directory: Path) -> str:
    seconds = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", *command], cwd=directory, capture_output=True, text=True, timeout=300,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip
        seconds.append(time.perf_counter() - began)
        assert done.returncode == 0, done.stderr
    return f"{seconds[0]:.2f} {statistics.median(seconds[1:]):.2f}"
