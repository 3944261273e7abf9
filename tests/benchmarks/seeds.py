"""An experiment over several seeds: `python tests/benchmarks/seeds.py [SEEDS] [CONFIG]` prints its table.

Without arguments it is the README's: the default experiment, ten seeds. Exit status 0 only when every seed's intervals
after SFT and after RL are apart; of the default experiment, when SFT ends between 40 and 80 %, too, and RL at least 20
points higher or above 95 %.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

DEFAULT = Path(__file__).parents[2] / "configs" / "arithmetic.py"


def main(seeds: int = 10, config: Path = DEFAULT) -> int:
    print("| seed | before SFT | after SFT | after RL | gain | holds |\n|---|---|---|---|---|---|", flush=True)
    results = [row(config, seed) for seed in range(seeds)]
    return 0 if all(results) else 1


def record_of(config: Path, seed: int) -> dict[str, Any]:
    """The record of a run of the config with this seed."""
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", str(config), "--set", f"seed={seed}", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
        timeout=3600,
    )
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def row(config: Path, seed: int) -> bool:
    points = {entry["point"]: entry for entry in record_of(config, seed)["accuracies"]}
    base, sft, rl = (points[point] for point in ("base", "sft", "rl"))
    gain = rl["accuracy"] - sft["accuracy"]
    holds = rl["low"] > sft["high"]
    if config == DEFAULT:
        holds = holds and 0.4 <= sft["accuracy"] <= 0.8 and (gain >= 0.2 or rl["accuracy"] > 0.95)
    print(
        f"| {seed} | {share(base)} | {share(sft)} | {share(rl)} | {100 * gain:+.1f} | {'yes' if holds else 'NO'} |",
        flush=True,
    )
    return holds


def share(point: dict[str, float]) -> str:
    return f"{100 * point['accuracy']:.1f} % ({100 * point['low']:.1f} to {100 * point['high']:.1f})"


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:2]), *map(Path, sys.argv[2:3])))
