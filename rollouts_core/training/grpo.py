"""From scored samples to training batches and step metrics: what makes the RL loop GRPO."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from rollouts_core.data.collate import collate_batch
from rollouts_core.data.tokenized import Example
from rollouts_core.training.advantages import compute_advantages
from rollouts_core.training.backend import Metrics, TrainBatch
from rollouts_core.types import RolloutBatch, Sample, Status


def prepare_grpo_batch(samples: Sequence[Sample], normalize_std: bool = True) -> RolloutBatch:
    """Scored samples with their group advantages."""
    rewards = [_reward(sample) for sample in samples]
    advantages = compute_advantages(rewards, [sample.group_index for sample in samples], normalize_std)
    return RolloutBatch(samples, rewards, advantages)


def to_train_batch(batch: RolloutBatch, aggregation: Literal["token", "sequence"]) -> TrainBatch:
    """Padded tensors, with advantage and rollout log-probability at each answer token and 0 elsewhere."""
    examples = [
        Example(np.asarray(sample.tokens, np.int32), np.asarray(sample.loss_mask, np.int32)) for sample in batch.samples
    ]
    tokens = sum(sample.response_length for sample in batch.samples)
    padded = collate_batch(examples, float(max(1, tokens if aggregation == "token" else len(examples))))
    rollout_BT = torch.zeros(padded.tokens_BT.shape)
    for row, sample in enumerate(batch.samples):
        rollout_BT[row, len(sample.prompt.tokens) : len(sample.tokens)] = torch.tensor(sample.rollout_log_probs)
    advantages_BT = torch.tensor(batch.advantages)[:, None] * padded.loss_mask_BT
    return replace(padded, advantages_BT=advantages_BT, rollout_logprobs_BT=rollout_BT)


def split(batch: RolloutBatch, parts: int) -> list[RolloutBatch]:
    """Equal parts of whole groups, in order."""
    size = len(batch.samples) // parts
    return [
        RolloutBatch(batch.samples[i : i + size], batch.rewards[i : i + size], batch.advantages[i : i + size])
        for i in range(0, len(batch.samples), size)
    ]


def rollout_metrics(batch: RolloutBatch) -> Metrics:
    """Rewards, lengths and endings of a step's samples, under TRL's names."""
    lengths = [sample.response_length for sample in batch.samples]
    groups: dict[int, list[float]] = {}
    for sample, reward in zip(batch.samples, batch.rewards, strict=True):
        groups.setdefault(sample.group_index, []).append(reward)
    deviations = [statistics.stdev(values) for values in groups.values()]
    return {
        "reward": statistics.fmean(batch.rewards),
        "reward_std": statistics.fmean(deviations),
        "frac_reward_zero_std": sum(deviation == 0 for deviation in deviations) / len(deviations),
        "completions/mean_length": statistics.fmean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": sum(s.status == Status.TRUNCATED for s in batch.samples) / len(batch.samples),
    }


def staleness_metrics(samples: Sequence[Sample], weight_version: int) -> Metrics:
    """By how many versions tokens are older than the weights that they train."""
    ages = [weight_version - version for sample in samples for version in sample.weight_versions]
    spans = [len(set(sample.weight_versions)) for sample in samples if sample.weight_versions]
    return {
        "rollout/staleness/mean": statistics.fmean(ages) if ages else 0.0,
        "rollout/staleness/max": float(max(ages, default=0)),
        "rollout/samples_of_several_versions": sum(span > 1 for span in spans) / max(1, len(spans)),
    }


def loss_metrics(passes: Sequence[Metrics]) -> Metrics:
    """The step's loss metrics from those of its passes; the engine mismatch is the first pass's, before any step."""
    total = {name: sum(metrics[name] for metrics in passes) for name in passes[0]}
    tokens, first = max(1.0, total["tokens_sum"]), passes[0]
    mean = {
        "entropy": total["entropy_sum"] / tokens,
        "sampling/importance_sampling_ratio/mean": total["ratio_sum"] / tokens,
        "clip_ratio/low_mean": total["clip_low_sum"] / tokens,
        "clip_ratio/high_mean": total["clip_high_sum"] / tokens,
        "clip_ratio/region_mean": (total["clip_low_sum"] + total["clip_high_sum"]) / tokens,
    }
    kl = {"kl": total["kl_sum"] / tokens} if "kl_sum" in total else {}
    corrected = {"sampling/corrected_fraction": total["corrected_sum"] / tokens} if "corrected_sum" in total else {}
    mismatch = {
        "sampling/sampling_logp_difference/mean": first["logp_difference_sum"] / max(1.0, first["tokens_sum"]),
        "sampling/sampling_logp_difference/max": first["logp_difference_max"],
        "sampling/mismatch_kl": first["mismatch_kl_sum"] / max(1.0, first["tokens_sum"]),
        "sampling/importance_sampling_ratio/max": max(metrics["ratio_max"] for metrics in passes),
    }
    return {"policy_loss": total["policy_loss_total"] / len(passes), **mean, **kl, **mismatch, **corrected}


def _reward(sample: Sample) -> float:
    assert sample.reward is not None, "samples are scored before advantages are computed"
    return sample.reward
