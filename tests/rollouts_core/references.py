"""Independent references for the losses: sums written out in Python floats, and TRL's own loss on the same numbers.

`python -m tests.rollouts_core.references` prints, for each algorithm, the largest difference from each.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from rollouts_core.config import algorithms as named
from rollouts_core.training.algorithms import Recipe, recipe_of
from rollouts_core.training.backend import TokenScores, TrainBatch
from rollouts_core.training.objectives import Extras, create_rl_loss

LONGEST = 8
KL, ENTROPY = 0.05, 0.02

ALGORITHMS: dict[str, named.Algorithm] = {
    "grpo (sequence)": named.GRPO(aggregation="sequence"),
    "grpo (token)": named.GRPO(),
    "dr_grpo": named.DrGRPO(),
    "dapo": named.DAPO(),
    "gspo": named.GSPO(clip_low=0.05, clip_high=0.08),
    "cispo": named.CISPO(weight_high=1.2),
    "rloo": named.RLOO(),
    "reinforce_plus_plus": named.ReinforcePlusPlus(),
    "maxrl": named.MaxRL(),
    "ppo": named.PPO(),
}
TRL = {
    "grpo (sequence)": {"loss_type": "grpo"},
    "grpo (token)": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 0.05,
        "epsilon_high": 0.08,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
}


@dataclass(frozen=True)
class Case:
    """Float64 numbers for answers of unlike length, some of no token at all."""

    lengths: tuple[int, ...]
    logprobs_M: torch.Tensor
    old_M: torch.Tensor
    reference_M: torch.Tensor
    advantages_M: torch.Tensor
    entropy_M: torch.Tensor

    @property
    def sequence_M(self) -> torch.Tensor:
        return torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))


def make_case(seed: int = 0, lengths: tuple[int, ...] = (3, 0, 8, 5, 1, 6)) -> Case:
    random = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    draw = lambda: torch.randn(count, generator=random, dtype=torch.float64)  # noqa: E731
    old = -3 * torch.rand(count, generator=random, dtype=torch.float64)
    advantages = torch.randn(len(lengths), generator=random, dtype=torch.float64)
    spread = torch.repeat_interleave(advantages, torch.tensor(lengths))
    return Case(lengths, old + 0.4 * draw(), old, old + 0.3 * draw(), spread, draw().abs())


def normalizer(recipe: Recipe, lengths: Sequence[int]) -> float:
    return {"token": sum(lengths), "sequence": len(lengths), "constant": len(lengths) * LONGEST}[recipe.aggregation]


def train_batch(case: Case, recipe: Recipe, total: float | None = None) -> TrainBatch:
    nothing = torch.zeros(len(case.old_M), dtype=torch.long)
    return TrainBatch(
        nothing, nothing, (), nothing, nothing, case.sequence_M, len(case.lengths),
        total or normalizer(recipe, case.lengths), case.advantages_M, case.old_M,
        reference_logprobs_M=case.reference_M, old_values_M=case.old_M, returns_M=case.reference_M,
    )  # fmt: skip


def ours(name: str, case: Case, **extras: Any) -> tuple[float, torch.Tensor]:
    """Loss and its gradient by the log-probabilities."""
    recipe = recipe_of(ALGORITHMS[name], LONGEST)
    logprobs = case.logprobs_M.clone().requires_grad_()
    loss, _ = create_rl_loss(recipe, Extras(**extras))(TokenScores(logprobs, case.entropy_M), train_batch(case, recipe))
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad


def written_out(name: str, case: Case, kl: float = 0.0, entropy: float = 0.0) -> float:
    """The objective with Python floats, a token at a time."""
    algorithm, total = ALGORITHMS[name], 0.0
    split = lambda values: [part.tolist() for part in values.split(case.lengths)]  # noqa: E731
    columns = zip(
        *map(split, (case.logprobs_M, case.old_M, case.reference_M, case.advantages_M, case.entropy_M)), strict=True
    )
    for logprobs, old, reference, advantages, entropies in columns:
        size, losses = len(logprobs), []
        mean_ratio = math.exp(sum(a - b for a, b in zip(logprobs, old, strict=True)) / size) if size else 1.0
        for logprob, before, ref, advantage, h in zip(logprobs, old, reference, advantages, entropies, strict=True):
            ratio = mean_ratio if algorithm.kind == "gspo" else math.exp(logprob - before)
            if isinstance(algorithm, named.CISPO):
                loss = -min(max(ratio, algorithm.weight_low), algorithm.weight_high) * advantage * logprob
            elif isinstance(algorithm, named.RLOO):
                loss = -ratio * advantage
            else:
                low, high = algorithm.clip_low, algorithm.clip_high
                loss = -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
            loss += kl * (math.exp(ref - logprob) - 1 - (ref - logprob)) - entropy * h
            losses.append(loss)
        aggregation = recipe_of(algorithm, LONGEST).aggregation
        total += sum(losses) / (len(losses) or 1 if aggregation == "sequence" else 1)
    return total / normalizer(recipe_of(algorithm, LONGEST), case.lengths)


def numeric_gradient(name: str, case: Case) -> torch.Tensor:
    """Central differences of `written_out`; CISPO's weight is held, for no gradient flows through it."""
    step = 1e-6
    gradient = []
    for index in range(len(case.logprobs_M)):
        ends = []
        for sign in (1, -1):
            moved = case.logprobs_M.clone()
            moved[index] += sign * step
            ends.append(written_out(name, replace(case, logprobs_M=moved)))
        gradient.append((ends[0] - ends[1]) / (2 * step))
    return torch.tensor(gradient, dtype=torch.float64)


def trl_loss(name: str, case: Case, kl: float = 0.0, entropy: float = 0.0) -> tuple[float, torch.Tensor]:
    """TRL's GRPO loss and its gradient; its model and its logging are stood in for, its arithmetic is its own."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    width, count = max(case.lengths), len(case.lengths)
    mask = torch.arange(width)[None] < torch.tensor(case.lengths)[:, None]
    padded = {
        key: torch.zeros(count, width, dtype=torch.float64) for key in ("logprobs", "old", "reference", "entropy")
    }
    for key, values in zip(padded, (case.logprobs_M, case.old_M, case.reference_M, case.entropy_M), strict=True):
        padded[key][mask] = values
    logprobs = padded["logprobs"].requires_grad_()
    advantages = torch.stack(
        [part[0] if len(part) else part.new_zeros(()) for part in case.advantages_M.split(case.lengths)]
    )
    chosen = {"epsilon_low": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token", **TRL[name]}
    same = lambda value, *_, **__: value  # noqa: E731
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, padded["entropy"], None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=kl, use_vllm=False,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1, max_completion_length=LONGEST, entropy_coef=entropy,
        _entropy_bonus_enabled=bool(entropy), use_adaptive_entropy=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=SimpleNamespace(num_processes=1, gather=same, reduce=same, sync_gradients=True), **chosen,
    )  # fmt: skip
    empty = torch.zeros(count, 0, dtype=torch.long)
    inputs = {
        "prompt_ids": empty, "prompt_mask": empty, "completion_ids": mask.long(), "completion_mask": mask.long(),
        "advantages": advantages, "old_per_token_logps": padded["old"], "ref_per_token_logps": padded["reference"],
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad[mask]


def differences(name: str) -> dict[str, float]:
    """The largest absolute difference from each reference, in value and in gradient."""
    case = make_case()
    value, gradient = ours(name, case)
    found = {"written out": abs(value - written_out(name, case))}
    if name != "cispo":
        found["central differences"] = (gradient - numeric_gradient(name, case)).abs().max().item()
    if name in TRL:
        other, other_gradient = trl_loss(name, case)
        found["TRL"] = abs(value - other)
        found["TRL's gradient"] = (gradient - other_gradient).abs().max().item()
    return found


def main() -> None:
    columns = ("written out", "central differences", "TRL", "TRL's gradient")
    print("| algorithm | " + " | ".join(columns) + " |\n|" + "---|" * 5)
    for name in ALGORITHMS:
        found = differences(name)
        print(f"| {name} | " + " | ".join(f"{found[c]:.1e}" if c in found else "" for c in columns) + " |")


if __name__ == "__main__":
    main()
