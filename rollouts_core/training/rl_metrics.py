"""What a step of reinforcement learning tells of itself, under TRL's names where TRL has one."""

import statistics
from collections.abc import Sequence

from rollouts_core.training.backend import Metrics, combined
from rollouts_core.types import Sample, Status


def rollout_metrics(samples: Sequence[Sample], rewards: Sequence[float]) -> Metrics:
    """Rewards, lengths and endings of a step's samples."""
    lengths = [sample.response_length for sample in samples]
    groups: dict[int, list[float]] = {}
    for sample, reward in zip(samples, rewards, strict=True):
        groups.setdefault(sample.group_index, []).append(reward)
    deviations = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in groups.values()]
    return {
        "reward": statistics.fmean(rewards),
        "reward_std": statistics.fmean(deviations),
        "frac_reward_zero_std": sum(deviation == 0 for deviation in deviations) / len(deviations),
        "completions/mean_length": statistics.fmean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": sum(s.status == Status.TRUNCATED for s in samples) / len(samples),
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


def loss_metrics(minibatches: Sequence[Metrics]) -> Metrics:
    """The step's loss metrics from those of its minibatches; the engine mismatch is the first's, before any step."""
    total, first = combined(minibatches), minibatches[0]
    tokens = max(1.0, total["tokens_sum"])
    optional = {
        "kl": "kl_sum",
        "sampling/corrected_fraction": "corrected_sum",
        "value_loss": "value_loss_sum",
    }
    return {
        "policy_loss": total["policy_loss_sum"] / len(minibatches),
        "entropy": total["entropy_sum"] / tokens,
        "padding": total["padding_sum"] / total["attended_sum"],
        "sampling/importance_sampling_ratio/mean": total["ratio_sum"] / tokens,
        "sampling/importance_sampling_ratio/max": total["ratio_max"],
        "clip_ratio/low_mean": total["clip_low_sum"] / tokens,
        "clip_ratio/high_mean": total["clip_high_sum"] / tokens,
        "clip_ratio/region_mean": (total["clip_low_sum"] + total["clip_high_sum"]) / tokens,
        "sampling/sampling_logp_difference/mean": first["logp_difference_sum"] / max(1.0, first["tokens_sum"]),
        "sampling/sampling_logp_difference/max": first["logp_difference_max"],
        "sampling/mismatch_kl": first["mismatch_kl_sum"] / max(1.0, first["tokens_sum"]),
        **{name: total[kept] / tokens for name, kept in optional.items() if kept in total},
    }
