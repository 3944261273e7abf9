"""`rollouts replay`: a run's RL again from its kept batches, or its batches again from its policies."""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from flows.preflight import store_named
from rollouts_core.config.loading import load_config
from rollouts_core.errors import BadInput
from rollouts_core.observe.run_list import find_run
from rollouts_core.stages.plan import plan


def replay_command(options: argparse.Namespace) -> int:
    """Exit status 1 when a step came out otherwise than it was recorded."""
    from rollouts_core.stages.job import prepare_torch
    from rollouts_core.stages.replay import generate_again, replay

    store = store_named(options.store)
    record = find_run(store.home, options.run)
    config = load_config(store.home / "runs" / record.run_id / "config.json")
    segments = plan(config).rl
    if not segments:
        raise BadInput(f"run {record.run_id} has no RL")
    device = prepare_torch(config.machine.device)
    if options.generate:
        out = Path(options.out or f"outputs/{record.run_id}/generated")
        for path, reward in generate_again(segments[0], store, options.generate, out, device):
            print(
                json.dumps({"batch": str(path), "reward": reward}) if options.json else f"{path}  reward {reward:.4f}"
            )
        return 0
    differing = 0
    with tempfile.TemporaryDirectory(prefix="rollouts-replay-") as scratch:
        for segment in segments:
            for step in replay(segment, store, Path(scratch) / segment.name, device):
                differing += not step.is_same
                if options.json:
                    print(json.dumps({**asdict(step), "same": step.is_same}))
                    continue
                values = "  ".join(
                    f"{name} {step.recorded[name]:.6g} -> {step.replayed[name]:.6g}" for name in step.recorded
                )
                print(f"step {step.step:>6}  {'same' if step.is_same else 'DIFFERS'}  {values}")
    if differing and not options.json:
        print(f"{differing} steps differ: other code, another machine, or another number of threads?")
    return 1 if differing else 0
