"""The default experiment under each algorithm: `python -m tests.benchmarks.algorithms [SEEDS]`, the table of the docs.

SFT is cached from one algorithm to the next. Exit status 0 only when every run gains 15 points by RL.
"""

import json
import subprocess
import sys
from pathlib import Path

from rollouts_core.config.algorithms import GROUP_ALGORITHMS

CONFIG = Path(__file__).parents[2] / "configs" / "arithmetic.py"
KINDS = (*GROUP_ALGORITHMS, "reinforce_plus_plus", "ppo")
LEAST_GAIN = 0.15


def main(seeds: int) -> int:
    print("| algorithm | " + " | ".join(f"seed {seed}" for seed in range(seeds)) + " |\n|" + "---|" * (seeds + 1))
    gains = []
    for kind in KINDS:
        runs = [accuracies(kind, seed) for seed in range(seeds)]
        told = " | ".join(f"{100 * sft:.1f} to {100 * rl:.1f} %" for sft, rl in runs)
        print(f"| `{kind}` | {told} |", flush=True)
        gains += [rl - sft for sft, rl in runs]
    return 0 if min(gains) >= LEAST_GAIN else 1


def accuracies(kind: str, seed: int) -> tuple[float, float]:
    """After SFT and after RL."""
    changes = [f"seed={seed}", f"rl.algorithm.kind={kind}"]
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", str(CONFIG), "--json", *(f"--set={change}" for change in changes)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
        timeout=1800,
    )
    points = {entry["point"]: entry["accuracy"] for entry in json.loads(done.stdout)["accuracies"]}
    return points["sft"], points["rl"]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 3))
