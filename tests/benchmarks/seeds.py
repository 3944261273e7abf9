"""The default experiment over ten seeds: `python tests/benchmarks/seeds.py [SEEDS]` prints the README's table.

Exit status 0 only when every seed ends SFT between 40 and 80 %, and RL at least 20 points higher or above 95 %, with
the intervals apart.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parents[2] / "configs" / "arithmetic.py"


def main(seeds: int) -> int:
    print("| seed | before SFT | after SFT | after RL | gain | holds |\n|---|---|---|---|---|---|", flush=True)
    results = [row(seed) for seed in range(seeds)]
    return 0 if all(results) else 1


def record_of(config: Path, seed: int) -> dict[str, Any]:
    """The record of a run of the config with this seed."""
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", str(config), "--set", f"seed={seed}", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
        timeout=1800,
    )
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def row(seed: int) -> bool:
    points = {entry["point"]: entry for entry in record_of(CONFIG, seed)["accuracies"]}
    base, sft, rl = (points[point] for point in ("base", "sft", "rl"))
    gain = rl["accuracy"] - sft["accuracy"]
    holds = 0.4 <= sft["accuracy"] <= 0.8 and (gain >= 0.2 or rl["accuracy"] > 0.95) and rl["low"] > sft["high"]
    print(
        f"| {seed} | {share(base)} | {share(sft)} | {share(rl)} | {100 * gain:+.1f} | {'yes' if holds else 'NO'} |",
        flush=True,
    )
    return holds


def share(point: dict[str, float]) -> str:
    return f"{100 * point['accuracy']:.1f} % ({100 * point['low']:.1f} to {100 * point['high']:.1f})"


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10))
