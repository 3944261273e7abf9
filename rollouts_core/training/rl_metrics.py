"""The metrics of a step of reinforcement learning, under TRL's names where TRL has one."""

import statistics
from collections.abc import Sequence

from rollouts_core.training.backend import Metrics, combined
from rollouts_core.training.episodes import episodes_of, whole
from rollouts_core.types import Sample, Status
from rollouts_core.types.episode import Observed, StopReason, Trajectory


def rollout_metrics(samples: Sequence[Sample]) -> Metrics:
    """Rewards, lengths and endings of a step's answers, and what was done in them."""
    answers = [whole([samples[place] for place in places]) for places in episodes_of(samples)]
    lengths = [answer.response_length for answer in answers]
    groups: dict[int, list[float]] = {}
    for answer in answers:
        groups.setdefault(answer.group_index, []).append(reward_of(answer))
    deviations = [_deviation(values) for values in groups.values()]
    return {
        "reward": statistics.fmean(reward_of(answer) for answer in answers),
        "reward_std": statistics.fmean(deviations),
        "frac_reward_zero_std": sum(deviation == 0 for deviation in deviations) / len(deviations),
        "completions/mean_length": statistics.fmean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": sum(s.status == Status.TRUNCATED for s in answers) / len(answers),
        **_component_metrics(answers),
        **_episode_metrics([answer.trajectory for answer in answers if answer.trajectory is not None]),
    }


def reward_of(sample: Sample) -> float:
    assert sample.reward is not None, "samples are scored before they are trained on"
    return sample.reward


def _component_metrics(answers: Sequence[Sample]) -> Metrics:
    """Metrics of the parts of rewards, over the answers that have them."""
    values: dict[str, list[float]] = {}
    for answer in answers:
        for name, value in answer.rewards.items():
            values.setdefault(name, []).append(value)
    means = {f"rewards/{name}/mean": statistics.fmean(found) for name, found in values.items()}
    return means | {f"rewards/{name}/std": _deviation(found) for name, found in values.items()}


def _episode_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Turns, calls and endings; and of turns behind the first, how many were rendered anew, and how many would have
    been other tokens if the conversation had been encoded again."""
    if not trajectories:
        return {}
    finals = [trajectory.final for trajectory in trajectories]
    results = [
        result
        for trajectory in trajectories
        for event in trajectory.events
        if isinstance(event, Observed)
        for result in event.results
    ]
    later = [turn for final in finals for turn in final.sampled[1:]]
    stops = {f"episodes/stop/{stop}": sum(final.stop == stop for final in finals) / len(finals) for stop in StopReason}
    return {
        "episodes/turns": statistics.fmean(final.turn_idx for final in finals),
        "tools/call_frequency": len(results) / len(finals),
        "tools/failure_frequency": sum(result.failed for result in results) / max(1, len(results)),
        "episodes/prefix_violations": sum(turn.differs for turn in later) / max(1, len(later)),
        "episodes/rewritten_turns": sum(not turn.continues for turn in later) / max(1, len(later)),
        **{name: share for name, share in stops.items() if share},
    }


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def staleness_metrics(samples: Sequence[Sample], weight_version: int) -> Metrics:
    """The staleness of samples: by how many versions tokens are older than the weights that they train."""
    ages = [weight_version - version for sample in samples for version in sample.weight_versions]
    spans = [len(set(sample.weight_versions)) for sample in samples if sample.weight_versions]
    return {
        "rollout/staleness/mean": statistics.fmean(ages) if ages else 0.0,
        "rollout/staleness/max": float(max(ages, default=0)),
        "rollout/samples_of_several_versions": sum(span > 1 for span in spans) / max(1, len(spans)),
    }


def loss_metrics(minibatches: Sequence[Metrics]) -> Metrics:
    """The step's loss metrics from those of its minibatches; the engine mismatch is the first's, before any step.

    A loss of one's own has its own.
    """
    total, first = combined(minibatches), minibatches[0]
    if "tokens_sum" not in total:
        return {name.removesuffix("_sum"): value for name, value in total.items()}
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
