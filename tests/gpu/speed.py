"""How fast training, generation and the export of weights are on one GPU, and how much memory they take.

Model FLOP utilisation is that of the metrics (`rollouts_core.training.flops`). Weights are random.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rollouts_core.config.algorithms import GRPO
from rollouts_core.config.training import Recomputed
from rollouts_core.data.tokenized import Example
from rollouts_core.inference.engine import GenerationRequest
from rollouts_core.inference.torch_engine import TorchEngine, copy_of
from rollouts_core.metrics.gpus import GPUWatch
from rollouts_core.training.algorithms import recipe_of
from rollouts_core.training.backend import LossFunction
from rollouts_core.training.collate import learnt_tokens, pack_batch
from rollouts_core.training.objectives import Extras, create_cross_entropy_loss, create_rl_loss
from rollouts_core.training.pytorch import Optimization, create_pytorch_backend
from tests.gpu.rows import tell

REPEATS = 5


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


def main(device: str) -> None:
    dry = device == "cpu"
    lengths = (256, 512) if dry else (8192, 16384)
    for shape in SMALL if dry else SHAPES:
        for length in lengths:
            sft = [_example(length, shape.vocabulary, share=0.5)]
            for again in (True, "selective"):
                kept = "attention computed again" if again is True else "attention kept"
                _train(f"{shape.name} SFT {length}, {kept}", shape, sft, create_cross_entropy_loss(), device, again)
        _train(f"{shape.name} SFT {length}, compiled", shape, sft, create_cross_entropy_loss(), device, compiled=True)
        rl = [_example(lengths[-1], shape.vocabulary, share=0.9)]
        loss = create_rl_loss(recipe_of(GRPO(), lengths[-1]), Extras())
        _train(f"{shape.name} RL {lengths[-1]}", shape, rl, loss, device)
        _generate(shape, device, 16 if dry else 256)
    used = ", ".join(f"{name.removeprefix('gpu/')} {value:.4g}" for name, value in GPUWatch().metrics().items())
    tell("the GPU, by NVML", used or "says nothing")


def _train(
    name: str,
    shape: Shape,
    examples: list[Example],
    loss: LossFunction,
    device: str,
    again: Recomputed = "selective",
    compiled: bool = False,
) -> None:
    backend = create_pytorch_backend(
        random_model(shape, device), loss, Optimization(1e-6), activation_checkpointing=again, compiled=compiled
    )
    _forget_peak(device)

    flops = 0.0

    def step() -> None:
        nonlocal flops
        passed = backend.forward_backward(pack_batch(examples, float(learnt_tokens(examples))))
        backend.optim_step().result()
        flops = passed.result()["flops_sum"]

    seconds = _median(step, device)
    tokens = sum(len(example.tokens) for example in examples)
    peak = backend.peak_flops
    share = "" if peak is None else f", {flops / seconds / peak:.1%} of {peak / 1e12:.1f} TFLOP/s"
    tell(name, f"{tokens / seconds:,.0f} tokens/s{share}{_peak(device)}")
    exported = _median(lambda: {n: value.cpu() for n, value in backend.get_weights().result().items()}, device)
    tell(f"{name}, weights to the host", f"{exported:.2f} s")


def _generate(shape: Shape, device: str, answer: int) -> None:
    engine = TorchEngine(copy_of(random_model(shape, device)), 64 + answer, 64)
    random = np.random.default_rng(0)
    prompts = random.integers(1, shape.vocabulary, (64, 64)).tolist()
    requests = [GenerationRequest(str(i), tuple(p), answer, (), 1.0, i) for i, p in enumerate(prompts)]
    for how in (", CUDA graphs", "") if device == "cuda" else ("",):
        if not how:
            engine._decoder._record = None  # type: ignore[attr-defined]
        seconds = _median(lambda: engine.generate(requests), device)
        tell(f"{shape.name} generation, 64 requests{how}", f"{64 * answer / seconds:,.0f} tokens/s")


def random_model(shape: Shape, device: str) -> Any:
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


def _peak(device: str) -> str:
    return f", {torch.cuda.max_memory_allocated() / 1e9:.1f} GB" if device == "cuda" else ""


if __name__ == "__main__":
    main(sys.argv[1])
