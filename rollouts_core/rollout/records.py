"""A sample in a run's record: enough to read it, colour its tokens, and see it beside its group."""

from collections.abc import Iterable, Sequence
from typing import Any

from rollouts_core.data.messages import message_to_data
from rollouts_core.data.token_text import token_pieces
from rollouts_core.metrics.loggers import answer_record
from rollouts_core.types import Message, Sample

DECIMALS = 5
"""Decimals of log-probabilities and advantages: further digits would be most of the size of a long answer."""


def sample_record(sample: Sample, advantages: Iterable[float], tokenizer: Any) -> dict[str, Any]:
    """`advantages`: one for each learnt token (loss mask 1), in order; `pieces`: the text of each token."""
    episode = sample.trajectory
    return {
        **answer_record(sample),
        "group": sample.group_index,
        "sample": sample.episode,
        "status": sample.status,
        "stop": episode.final.stop if episode else None,
        "rewards": dict(sample.rewards),
        "advantages": [round(float(advantage), DECIMALS) for advantage in advantages],
        "tokens": list(sample.tokens),
        "pieces": token_pieces(tokenizer, sample.tokens),
        "rollout_log_probs": [round(logprob, DECIMALS) for logprob in sample.rollout_log_probs],
        "weight_versions": list(sample.weight_versions),
        "loss_mask": list(sample.loss_mask),
        "messages": [message_to_data(message) for message in _conversation(sample)],
    }


def _conversation(sample: Sample) -> Sequence[Message]:
    if sample.trajectory:
        return sample.trajectory.final.messages
    return (*sample.prompt.messages, Message("assistant", sample.response))
