"""Loss curves that are equal by definition: `python -m tests.benchmarks.curves [--plot FILE.svg]`.

SFT on the default experiment's demonstrations, float32, AdamW: each example in a pass of its own on one device; packed;
packed with activations computed again; and over two ranks (FSDP2, gloo). The same for LoRA. Tells each curve's largest
relative difference from the first of its kind, over the first 50 steps and over all. They add up the same numbers in
other orders, and what that makes of the last bits grows with the steps. Exit status 0 only when no difference is above
1e-3 in the first 50 steps.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rollouts_core.metrics.loggers import read_jsonl
from rollouts_core.observe.plots import line_plot

CONFIG = Path(__file__).parents[2] / "configs" / "arithmetic.py"
STEPS = 150
EARLY = 50
MOST = 1e-3
COMMON = ("rl=null", "data.heldout=null", f"sft.steps={STEPS}", "sft.batch_size=32", "sft.log_every=1")
LORA = 'backend.lora={"rank": 8}'
CURVES: dict[str, tuple[str, ...]] = {
    "each example alone": ("sft.tokens_per_pass=1",),
    "packed": (),
    "packed, activations computed again": ("backend.activation_checkpointing=true",),
    "two ranks": ("backend.processes=2",),
    "LoRA, each example alone": ("sft.tokens_per_pass=1", LORA),
    "LoRA, packed": (LORA,),
    "LoRA, two ranks": (LORA, "backend.processes=2"),
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plot", type=Path, help="draw the curves there")
    options = parser.parse_args()
    shown = [1, EARLY, 2 * EARLY, STEPS]
    print("| curve | " + " | ".join(f"step {step}" for step in shown) + " | apart, first 50 | apart, all |")
    print("|---" * (len(shown) + 3) + "|", flush=True)
    curves: dict[str, list[float]] = {}
    worst = 0.0
    with tempfile.TemporaryDirectory() as directory:
        for name, changes in CURVES.items():
            curves[name] = losses(changes, Path(directory) / name.replace(" ", "-"))
            first = curves["LoRA, each example alone" if LORA in changes else "each example alone"]
            apart = [abs(one - other) / other for one, other in zip(curves[name], first, strict=True)]
            worst = max(worst, *apart[:EARLY])
            told = " | ".join(f"{curves[name][step - 1]:.5f}" for step in shown)
            print(f"| {name} | {told} | {max(apart[:EARLY]):.1e} | {max(apart):.1e} |", flush=True)
    if options.plot:
        steps = [float(step) for step in range(1, STEPS + 1)]
        plot = line_plot("SFT: loss per token", "step", {name: (steps, found) for name, found in curves.items()})
        options.plot.write_text(plot)
    return 0 if worst <= MOST else 1


def losses(changes: tuple[str, ...], directory: Path) -> list[float]:
    settings = [f"--set={change}" for change in (*COMMON, *changes)]
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", str(CONFIG), "--json", "--store", str(directory), *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
        timeout=1800,
    )
    results = Path(json.loads(done.stdout)["report"]).parent
    return [record["loss"] for record in read_jsonl(results / "sft_metrics.jsonl")]


if __name__ == "__main__":
    sys.exit(main())
