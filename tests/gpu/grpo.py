"""GRPO from random weights to a target reward, and where a step's time goes."""

import statistics
import sys

from tests.gpu.curves import reinforced
from tests.gpu.rows import tell
from tests.gpu.speed import SHAPES, SMALL, random_model

TARGET = 0.8
PHASES = ("step", "gen", "update_actor", "update_weights")


def main(device: str) -> None:
    dry = device == "cpu"
    shape, groups, answer, rate, most = (SMALL[0], 2, 16, 1e-3, 4) if dry else (SHAPES[0], 32, 256, 1e-5, 100)
    steps: list[dict[str, float]] = []
    for step in reinforced(random_model(shape, device), groups, 8, 64, answer, rate, most):
        steps.append(step.metrics)
        if len(steps) >= 3 and statistics.fmean(entry["reward"] for entry in steps[-3:]) >= TARGET:
            break
    phases = {name: statistics.median(entry[f"timing_s/{name}"] for entry in steps) for name in PHASES}
    tell(f"{shape.name}, {groups * 8} answers of {answer}", ", ".join(f"{n} {s:.3f} s" for n, s in phases.items()))
    if "perf/mfu" in steps[-1]:
        tell("model FLOP utilisation of an update", f"{statistics.median(entry['perf/mfu'] for entry in steps):.1%}")
    spent = sum(entry["timing_s/step"] for entry in steps)
    reward = f"{steps[0]['reward']:.3f} to {steps[-1]['reward']:.3f} in {len(steps)} steps, {spent:.1f} s"
    tell("reward", reward, None if dry else statistics.fmean(entry["reward"] for entry in steps[-3:]) >= TARGET)


if __name__ == "__main__":
    main(sys.argv[1])
