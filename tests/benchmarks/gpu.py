"""Training, generation and GRPO on one GPU: `python -m tests.benchmarks.gpu`; `--dry`: small shapes, on the CPU.

Needs torch and transformers of the machine's own, no network: weights are random. Model FLOP utilisation counts 6 FLOPs
per parameter and token (the head's only for learnt tokens, embeddings none) and 6 x layers x heads x head size x length
for causal attention, forward and backward, against the GPU's dense bfloat16 peak.

GRPO: seed 0, groups of 8, from random weights, rewarded by the share of even tokens, which begins at a half; where a
step's time goes, and the time to a mean reward of 0.8 over three steps.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rollouts_core.config.algorithms import GRPO
from rollouts_core.data.prompts import DataBuffer
from rollouts_core.data.tokenized import Example
from rollouts_core.inference.embedded import EmbeddedEngine
from rollouts_core.inference.engine import GenerationRequest
from rollouts_core.inference.torch_engine import TorchEngine, copy_of
from rollouts_core.rollout.manager import AsyncRolloutManager
from rollouts_core.rollout.settings import RolloutConfig
from rollouts_core.rollout.source import generating
from rollouts_core.training.algorithms import recipe_of
from rollouts_core.training.backend import LossFunction
from rollouts_core.training.collate import learnt_tokens, pack_batch
from rollouts_core.training.objectives import Extras, create_cross_entropy_loss, create_rl_loss
from rollouts_core.training.pytorch import Optimization, create_pytorch_backend
from rollouts_core.training.rl import RLTrainingConfig, run_rl_training
from rollouts_core.types import Message, Prompt

PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bfloat16 FLOP/s, from the makers' data sheets."""
REPEATS = 5
TARGET = 0.8
PHASES = ("step", "gen", "update_actor", "update_weights")


@dataclass(frozen=True)
class Shape:
    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int


SHAPES = [
    Shape("Qwen3-0.6B", 1024, 3072, 28, 16, 8, 128, 151936),
    Shape("Qwen3-4B", 2560, 9728, 36, 32, 8, 128, 151936),
]
SMALL = [Shape("small", 64, 128, 2, 4, 2, 16, 512)]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry", action="store_true", help="small shapes on the CPU")
    options = parser.parse_args()
    device = "cpu" if options.dry else "cuda"
    peak = None if options.dry else next((p for n, p in PEAKS.items() if n in torch.cuda.get_device_name()), None)
    lengths = (256, 512) if options.dry else (8192, 16384)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device == 'cuda' else 'CPU, dry run'}")
    print(f"{'':<26}{'tokens/s':>12}{'utilisation':>13}{'peak GB':>9}")
    for shape in SMALL if options.dry else SHAPES:
        for length in lengths:
            sft = [_example(length, shape.vocabulary, share=0.5)]
            _train(f"{shape.name} SFT {length}", shape, sft, create_cross_entropy_loss(), device, peak)
        _train(f"{shape.name} SFT, compiled", shape, sft, create_cross_entropy_loss(), device, peak, compiled=True)
        rl = [_example(lengths[-1], shape.vocabulary, share=0.9)]
        loss = create_rl_loss(recipe_of(GRPO(), lengths[-1]), Extras())
        _train(f"{shape.name} RL {lengths[-1]}", shape, rl, loss, device, peak)
        _generate(shape, device, 16 if options.dry else 256)
    grpo = (SMALL[0], 2, 16, 1e-3) if options.dry else (SHAPES[0], 32, 256, 1e-5)
    _grpo(*grpo, device, 3 if options.dry else 100)
    return 0


def _train(
    name: str,
    shape: Shape,
    examples: list[Example],
    loss: LossFunction,
    device: str,
    peak: float | None,
    compiled: bool = False,
) -> None:
    model = _model(shape, device)
    if compiled:
        for layer in model.model.layers:
            for module in (layer.mlp, layer.input_layernorm, layer.post_attention_layernorm):
                module.compile(dynamic=True)
    backend = create_pytorch_backend(model, loss, Optimization(1e-6), activation_checkpointing=True)
    _forget_peak(device)

    def step() -> None:
        backend.forward_backward(pack_batch(examples, float(learnt_tokens(examples)))).result()
        backend.optim_step().result()

    seconds = _median(step, device)
    tokens = sum(len(example.tokens) for example in examples)
    share = "" if peak is None else f"{_flops(shape, examples) / seconds / peak:.1%}"
    print(f"{name:<26}{tokens / seconds:>12,.0f}{share:>13}{_peak_gb(device):>9.1f}", flush=True)
    exported = _median(lambda: {n: value.cpu() for n, value in backend.get_weights().result().items()}, device)
    print(f"{'':<26}weights to the host: {exported:.2f} s", flush=True)


def _generate(shape: Shape, device: str, answer: int) -> None:
    engine = TorchEngine(copy_of(_model(shape, device)), 64 + answer, 64)
    random = np.random.default_rng(0)
    prompts = random.integers(1, shape.vocabulary, (64, 64)).tolist()
    requests = [GenerationRequest(str(i), tuple(p), answer, (), 1.0, i) for i, p in enumerate(prompts)]
    seconds = _median(lambda: engine.generate(requests), device)
    print(f"{shape.name + ' generation':<26}{64 * answer / seconds:>12,.0f}", flush=True)


def _grpo(shape: Shape, groups: int, answer: int, rate: float, device: str, most_steps: int) -> None:
    group, prompt, recipe = 8, 64, recipe_of(GRPO(), answer)
    policy = _model(shape, device)
    backend = create_pytorch_backend(policy, create_rl_loss(recipe, Extras()), Optimization(rate))
    random = np.random.default_rng(0)
    asked = random.integers(1, shape.vocabulary, (512, prompt)).tolist()
    buffer = DataBuffer([Prompt((Message("user", ""),), tuple(ids), {}, row) for row, ids in enumerate(asked)], 0)
    make_manager = partial(
        AsyncRolloutManager,
        tokenizer=_NoWords(),
        data_buffer=buffer,
        reward=lambda sample: sum(token % 2 == 0 for token in sample.tokens[prompt:]) / answer,
        config=RolloutConfig(groups, group, answer, 1.0, 0),
    )
    engine = TorchEngine(copy_of(policy), prompt + answer, groups * group)
    steps: list[dict[str, float]] = []
    with generating(lambda: EmbeddedEngine(engine), make_manager, same_thread=True) as rollouts:
        for step in run_rl_training(backend, rollouts, RLTrainingConfig(most_steps, recipe, max_new_tokens=answer)):
            steps.append(step.metrics)
            if len(steps) >= 3 and statistics.fmean(entry["reward"] for entry in steps[-3:]) >= TARGET:
                break
    phases = {name: statistics.median(entry[f"timing_s/{name}"] for entry in steps) for name in PHASES}
    told = ", ".join(f"{name} {seconds:.3f}" for name, seconds in phases.items())
    print(f"{shape.name} GRPO, {groups * group} answers of {answer} tokens: {told} s", flush=True)
    spent = sum(entry["timing_s/step"] for entry in steps)
    print(f"{'':<26}reward {steps[0]['reward']:.3f} to {steps[-1]['reward']:.3f}: {len(steps)} steps, {spent:.1f} s")


class _NoWords:
    """A tokenizer as far as the manager needs one: nothing ends an answer, and nobody reads it."""

    eos_token_id = -1

    def decode(self, tokens: Any, skip_special_tokens: bool) -> str:
        return ""


def _model(shape: Shape, device: str) -> Any:
    config = Qwen3Config(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head, tie_word_embeddings=True, max_position_embeddings=32768,
    )  # fmt: skip
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _example(length: int, vocabulary: int, share: float) -> Example:
    random = np.random.default_rng(0)
    mask = (np.arange(length) >= length * (1 - share)).astype(np.int32)
    learnt = int(mask.sum())
    streams = {"rollout_logprobs": np.full(learnt, -1.0), "advantages": random.standard_normal(learnt)}
    return Example(random.integers(1, vocabulary, length).astype(np.int32), mask, 0, streams)


def _flops(shape: Shape, examples: list[Example]) -> float:
    attention = shape.hidden * shape.head * (2 * shape.heads + 2 * shape.kv_heads)
    inner = shape.layers * (attention + 3 * shape.hidden * shape.intermediate)
    total = 0.0
    for example in examples:
        length = len(example.tokens)
        total += 6 * inner * length + 6 * shape.vocabulary * shape.hidden * int(example.loss_mask.sum())
        total += 6 * shape.layers * shape.heads * shape.head * length**2
    return total


def _median(work: Callable[[], object], device: str) -> float:
    seconds = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def _forget_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak_gb(device: str) -> float:
    return torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else float("nan")


if __name__ == "__main__":
    sys.exit(main())
