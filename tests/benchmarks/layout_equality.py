"""How far ranks that share passes are from one device: `python -m tests.benchmarks.layout_equality [LAYOUT ...]`.

Real gloo ranks, started by torchrun, take four steps of a tiny model in float32, by each layout and what may be
combined with it; ranks that share experts, of a tiny Qwen3-MoE. The largest relative difference of losses (of RL:
policy, value, entropy and KL terms), of gradients' norms, and the largest difference of a weight, beside one device's.
"""

import os
import sys
import tempfile
from pathlib import Path

from tests.rollouts_core.on_ranks import STEPS, train, train_grpo
from tests.rollouts_core.training.test_fsdp import on_ranks
from tests.rollouts_core.training.test_layouts import COMBINED, LAYOUTS, OF_EXPERTS, alone, mixture, wide_model


def main() -> None:
    print(f"{'layout':<16}{'what':<20}{'losses':>10}{'norms':>10}{'weights':>10}")
    for layout in sys.argv[1:] or (*LAYOUTS, *OF_EXPERTS):
        ranks, *shared = (LAYOUTS | OF_EXPERTS)[layout]
        os.environ |= {"ROLLOUTS_TEST_LAYOUT": " ".join(map(str, shared)), "OMP_NUM_THREADS": "1"}
        for what in (*COMBINED, "read-balanced", "read-replayed") if layout in OF_EXPERTS else COMBINED:
            with tempfile.TemporaryDirectory() as directory:
                _compare(layout, ranks, what, Path(directory))


def _compare(layout: str, ranks: int, what: str, directory: Path) -> None:
    model = mixture("qwen3_moe") if layout in OF_EXPERTS else wide_model()
    model.save_pretrained(directory / "model")
    told, weights = on_ranks(what, directory, ranks)
    backend = alone(what, model)
    replayed = what.endswith("replayed")
    steps = train_grpo(backend) if what.endswith("grpo") else train(backend, range(STEPS), replayed=replayed)
    pairs = list(zip(told, steps, strict=True))
    losses = max(_apart(one[name], other[name]) for one, other in pairs for name in other if "loss" in name)
    norms = max(_apart(one["grad_norm"], other["grad_norm"]) for one, other in pairs)
    own = backend.get_weights().result()
    most = max(float((weights[name] - value).abs().max()) for name, value in own.items())
    name = what.partition("-")[2] or "adamw"
    print(f"{layout:<16}{name:<20}{losses:>10.1e}{norms:>10.1e}{most:>10.1e}", flush=True)


def _apart(one: float, other: float) -> float:
    return abs(one - other) / abs(other)


if __name__ == "__main__":
    main()
