"""Curves in bfloat16 on the device beside float32 on the CPU: supervised losses, and the reward of GRPO."""

import statistics
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from rollouts_core.config.algorithms import GRPO
from rollouts_core.data.prompts import DataBuffer
from rollouts_core.inference.embedded import EmbeddedEngine
from rollouts_core.inference.torch_engine import TorchEngine, copy_of
from rollouts_core.rollout.manager import AsyncRolloutManager
from rollouts_core.rollout.settings import RolloutConfig
from rollouts_core.rollout.source import generating
from rollouts_core.training.algorithms import recipe_of
from rollouts_core.training.collate import learnt_tokens, pack_batch
from rollouts_core.training.objectives import Extras, create_cross_entropy_loss, create_rl_loss
from rollouts_core.training.pytorch import Optimization, create_pytorch_backend
from rollouts_core.training.rl import RLStep, RLTrainingConfig, run_rl_training
from rollouts_core.types import Message, Prompt
from tests.gpu.attention import FAMILIES, seeded_model
from tests.gpu.rows import tell
from tests.rollouts_core.training.test_packed import sequences

FAMILY = "qwen3, shared key heads"
SFT_STEPS, RL_STEPS, LAST = 40, 12, 4
GROUPS, GROUP, PROMPT, ANSWER = 8, 8, 8, 12


def main(device: str) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    there = list(supervised(seeded_model(FAMILIES[FAMILY](), device, dtype)))
    here = list(supervised(seeded_model(FAMILIES[FAMILY](), "cpu", torch.float32)))
    apart = max(abs(one - other) / other for one, other in zip(there, here, strict=True))
    tell("SFT losses", f"{there[0]:.4f} to {there[-1]:.4f}, at most {apart:.2%} from float32's", apart < 0.05)
    for place, kind in dict.fromkeys(((device, dtype), ("cpu", torch.float32))):
        steps = list(
            reinforced(seeded_model(FAMILIES[FAMILY](), place, kind), GROUPS, GROUP, PROMPT, ANSWER, 3e-3, RL_STEPS)
        )
        rewards = [step.metrics["reward"] for step in steps]
        apart = statistics.fmean(step.metrics["sampling/sampling_logp_difference/mean"] for step in steps)
        first, last = statistics.fmean(rewards[:LAST]), statistics.fmean(rewards[-LAST:])
        told = f"reward {first:.3f} to {last:.3f}; engine and trainer {apart:.1e} apart"
        tell(f"GRPO in {kind} on {place}", told, last > first + 0.05 and apart < 0.05)


def supervised(model: Any) -> Iterator[float]:
    backend = create_pytorch_backend(model, create_cross_entropy_loss(), Optimization(1e-3))
    for step in range(SFT_STEPS):
        examples = sequences([60, 90, 30, 120], seed=step % 4)
        tokens = float(learnt_tokens(examples))
        summed = backend.forward_backward(pack_batch(examples, tokens))
        backend.optim_step().result()
        yield summed.result()["loss_sum"] / tokens


def reinforced(
    model: Any, groups: int, group: int, prompt: int, answer: int, rate: float, most: int
) -> Iterator[RLStep]:
    """GRPO from seed 0, rewarded by the share of even tokens, which begins at a half."""
    vocabulary = model.config.vocab_size
    recipe = recipe_of(GRPO(), answer)
    backend = create_pytorch_backend(model, create_rl_loss(recipe, Extras()), Optimization(rate))
    random = np.random.default_rng(0)
    asked = random.integers(1, vocabulary, (512, prompt)).tolist()
    buffer = DataBuffer([Prompt((Message("user", ""),), tuple(ids), {}, row) for row, ids in enumerate(asked)], 0)
    make_manager = partial(
        AsyncRolloutManager,
        tokenizer=NoWords(),
        data_buffer=buffer,
        reward=lambda sample: sum(token % 2 == 0 for token in sample.tokens[prompt:]) / answer,
        config=RolloutConfig(groups, group, answer, 1.0, 0),
    )
    engine = TorchEngine(copy_of(model), prompt + answer, groups * group)
    with generating(lambda: EmbeddedEngine(engine), make_manager, same_thread=True) as rollouts:
        yield from run_rl_training(backend, rollouts, RLTrainingConfig(most, recipe, max_new_tokens=answer))


class NoWords:
    """A tokenizer as far as the manager needs one: nothing ends an answer, and nobody reads it."""

    eos_token_id = -1

    def decode(self, tokens: Any, skip_special_tokens: bool) -> str:
        return ""


if __name__ == "__main__":
    main(sys.argv[1])
