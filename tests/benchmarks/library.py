"""What the library's loops cost beside the same arithmetic without them: `python -m tests.benchmarks.library`.

SFT beside a bare torch loop over the same packed batches, and `rc.grpo` beside its loop written out; steps in turn,
each model its own, medians. And how long the imports take.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import rollouts_core as rc
from rollouts_core.inference.torch_engine import copy_of
from rollouts_core.training.collate import pack_batch
from rollouts_core.training.policy import create_policy

SHAPE = rc.ScratchModel(hidden_size=512, layers=4, heads=8, kv_heads=8, intermediate_size=1536)
ROWS = [
    {"messages": [{"role": "user", "content": f"{a:03}+{b:03}="}, {"role": "assistant", "content": f"{a + b:04}" * 12}]}
    for a, b in zip(range(0, 800, 10), range(800, 0, -10), strict=True)
]
LENGTH = 80


def bare_sft(policy: rc.LanguageModel, batch: int) -> Iterator[None]:
    """As torch's tutorials have it: the batches stand ready."""
    model, loss = create_policy(policy.model), rc.create_cross_entropy_loss()
    examples = rc.examples_from(ROWS, policy)
    packed = [pack_batch(examples[i : i + batch], float(batch * 48)) for i in range(0, len(examples), batch)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    while True:
        for one in packed:
            value, _ = loss(model(one), one)
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield


def library_sft(policy: rc.LanguageModel, batch: int) -> Iterator[Any]:
    return rc.sft(policy, ROWS, rc.SFTConfig(steps=10**6, batch_size=batch, learning_rate=1e-4), progress=False)


def written_grpo(policy: rc.LanguageModel, batch: int) -> Iterator[None]:
    buffer = rc.DataBuffer(rc.prompts_from(ROWS, policy), seed=0)
    sampling = rc.RolloutConfig(batch_size=batch, n_samples_per_prompt=4, max_new_tokens=32, temperature=1.0, seed=0)
    loss = rc.create_rl_loss(rc.recipe_of(rc.GRPO(), 32))
    backend = rc.create_pytorch_backend(policy.model, loss, rc.Optimization(learning_rate=1e-4))
    engine = rc.create_engine(policy, max_length=LENGTH)
    step = 0
    while True:
        step += 1
        prompts, buffer = buffer.get_prompts(batch)
        samples = rc.generate_samples(engine, policy.tokenizer, prompts, sampling, step)
        rewards = [reward(sample) for sample in samples]
        groups = [sample.group_index for sample in samples]
        backend.forward_backward(rc.prepare_grpo_batch(samples, rc.compute_advantages(rewards, groups)))
        backend.optim_step().result()
        engine.update_weights(backend.get_weights().result(), backend.weight_version)
        yield


def reward(sample: rc.Sample) -> float:
    return len(set(sample.response)) / 10


def library_grpo(policy: rc.LanguageModel, batch: int) -> Iterator[Any]:
    config = rc.RLConfig(steps=10**6, batch_size=batch, n_samples_per_prompt=4, max_new_tokens=32, learning_rate=1e-4)
    return rc.grpo(policy, ROWS, reward, config, progress=False)


def in_turn(made: rc.LanguageModel, loops: list[Callable[..., Iterator[Any]]], batch: int, steps: int) -> list[float]:
    """Median milliseconds of each loop's steps."""
    begun = [loop(rc.LanguageModel(copy_of(made.model).requires_grad_(True), made.tokenizer), batch) for loop in loops]
    times: list[list[float]] = [[] for _ in loops]
    for number in range(steps + 3):
        for place, steps_of in enumerate(begun):
            began = time.perf_counter()
            next(steps_of)
            if number >= 3:
                times[place].append(1000 * (time.perf_counter() - began))
    return [statistics.median(of) for of in times]


def import_seconds(code: str) -> float:
    seconds = []
    for _ in range(7):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    nothing = import_seconds("pass")
    for code in (
        "import rollouts_core as rc",
        "import rollouts_core as rc; rc.RLConfig",
        "import rollouts_core as rc; rc.grpo",
        "import torch",
    ):
        print(f"{code:<48} {1000 * (import_seconds(code) - nothing):7.0f} ms")
    made = rc.create_model(
        (message["content"] for row in ROWS for message in row["messages"]), SHAPE, max_length=LENGTH
    )
    bare, ours = in_turn(made, [bare_sft, library_sft], 16, steps)
    print(f"SFT step: bare torch {bare:.1f} ms, rc.sft {ours:.1f} ms, {100 * (ours / bare - 1):+.1f} %")
    written, called = in_turn(made, [written_grpo, library_grpo], 4, steps)
    print(f"GRPO step: written out {written:.1f} ms, rc.grpo {called:.1f} ms, {100 * (called / written - 1):+.1f} %")


if __name__ == "__main__":
    main()
