"""On-policy beside overlapped generation: `python -m tests.benchmarks.overlap [--engine sglang] [--steps 60]`.

The default experiment, with one policy after SFT and one seed, once for each mode. Tells accuracy, the reward of the
last ten steps, seconds per step (median), and who waited for whom.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.servers import ENGINES

MODES: dict[str, list[str]] = {
    "on_policy": [],
    "overlapped": ["rl.rollouts.generation=overlapped", "rl.rollouts.max_staleness=1"],
    "overlapped, truncated": [
        "rl.rollouts.generation=overlapped",
        "rl.rollouts.max_staleness=1",
        "rl.rollouts.correction=truncate",
    ],
}
CONFIG = Path(__file__).parents[2] / "configs" / "arithmetic.py"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="embedded", choices=["embedded", "sglang"])
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    changes = [f"rl.steps={options.steps}", f"rl.steps_per_segment={options.steps}", f"engine.kind={options.engine}"]
    if options.engine != "embedded":
        changes.append(f"engine.python={ENGINES / options.engine / 'bin' / 'python'}")
    print(
        f"{'':<24}{'accuracy':>10}{'reward':>9}{'s/step':>8}{'trainer waits':>15}{'generation waits':>18}{'stale':>7}"
    )
    with tempfile.TemporaryDirectory(prefix="rollouts-overlap-") as store:
        for mode, more in MODES.items():
            tell(mode, run(Path(store), [*changes, *more]))
    return 0


def run(store: Path, changes: list[str]) -> tuple[dict[str, Any], list[dict[str, float]]]:
    sets = [part for change in changes for part in ("--set", change)]
    command = [sys.executable, "-m", "flows.cli", "run", str(CONFIG), "--store", str(store / "store"), "--json", *sets]
    done = subprocess.run(command, cwd=store, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    record = json.loads(done.stdout)
    lines = (store / "outputs" / record["run_id"] / "rl_metrics.jsonl").read_text().splitlines()
    return record, [json.loads(line) for line in lines]


def tell(mode: str, ran: tuple[dict[str, Any], list[dict[str, float]]]) -> None:
    record, steps = ran
    accuracy = record["accuracies"][-1]["accuracy"]
    settled = steps[5:]
    reward = statistics.fmean(step["reward"] for step in steps[-10:])

    def median(name: str) -> float:
        return statistics.median(step.get(name, 0.0) for step in settled)

    stale = sum(step.get("rollout/groups_stale", 0.0) for step in steps)
    trainer_waits = median("timing_s/trainer_waiting_for_data") or median("timing_s/gen")
    print(
        f"{mode:<24}{accuracy:>10.1%}{reward:>9.3f}{median('timing_s/step'):>8.3f}{trainer_waits:>15.3f}"
        f"{median('timing_s/generation_waiting_for_trainer'):>18.3f}{stale:>7.0f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
