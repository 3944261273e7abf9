"""The calculator experiment over seeds: `python -m tests.benchmarks.calculator [SEEDS]`, the table of docs/agents.md.

Sampled answers to held-out products, four each. Exit status 0 only when for every seed tool use and accuracy rise, with
the intervals of accuracy apart.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.seeds import record_of

CONFIG = Path(__file__).parents[2] / "configs" / "calculator.py"


def main(seeds: int) -> int:
    print("| seed | tool use after SFT | after RL | accuracy after SFT | after RL | holds |\n|---|---|---|---|---|---|")
    rows = [row(seed) for seed in range(seeds)]
    return 0 if all(rows) else 1


def row(seed: int) -> bool:
    results = Path(record_of(CONFIG, seed)["report"]).parent / "evaluation"
    sft, rl = (json.loads((results / f"{point}.json").read_text()) for point in ("sft", "rl"))
    holds = rl["tool_use"] > sft["tool_use"] and rl["accuracy"]["low"] > sft["accuracy"]["high"]
    uses = " | ".join(f"{100 * point['tool_use']:.1f} %" for point in (sft, rl))
    print(f"| {seed} | {uses} | {share(sft)} | {share(rl)} | {'yes' if holds else 'NO'} |", flush=True)
    return bool(holds)


def share(point: dict[str, Any]) -> str:
    accuracy = {name: 100 * value for name, value in point["accuracy"].items()}
    return f"{accuracy['mean']:.1f} % ({accuracy['low']:.1f} to {accuracy['high']:.1f})"


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 5))
