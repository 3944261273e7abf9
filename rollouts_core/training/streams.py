"""The sequences to train on, from scored samples; and the minibatches and passes of a step.

Decision: the trainer sees only streams of tokens: the tokens, their loss mask, and for each learnt token its advantage
and log-probabilities. It does not know which algorithm made them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rollouts_core.data.packing import best_fit
from rollouts_core.data.tokenized import Example, Floats
from rollouts_core.errors import BadInput
from rollouts_core.inference.told_experts import NOT_TOLD, from_text
from rollouts_core.training.backend import TokenScores, TrainBatch, TrainFuture
from rollouts_core.training.collate import learnt, learnt_tokens, pack_batch
from rollouts_core.training.losses import Aggregation
from rollouts_core.types import Sample

Cuts = Sequence[Sequence[Sequence[int]]]
"""Minibatches, their passes, and the sequences of each."""


def to_streams(samples: Sequence[Sample]) -> list[Example]:
    """Sequences with the engine's log-probabilities. Raises `BadInput` when no token of the batch is learnt."""
    examples = []
    for sample in samples:
        mask = np.asarray(sample.loss_mask, np.int32)
        logprobs = np.zeros(len(mask))
        logprobs[len(mask) - len(sample.rollout_log_probs) :] = sample.rollout_log_probs
        tokens = np.asarray(sample.tokens, np.int32)
        example = Example(tokens, mask, len(sample.prompt.tokens), experts=_experts(sample))
        examples.append(replace(example, streams={"rollout_logprobs": logprobs[learnt(example)]}))
    if not learnt_tokens(examples):
        raise BadInput("no token of the batch is learnt: every loss mask is 0 throughout")
    return examples


def _experts(sample: Sample) -> npt.NDArray[np.uint8] | None:
    """A row for each token; nobody tells of the last."""
    if not sample.experts:
        return None
    told = np.frombuffer(from_text(sample.experts), np.uint8).reshape(len(sample.tokens) - 1, -1)
    return np.concatenate([told, np.full_like(told[:1], NOT_TOLD)])


def minibatches_of(samples: Sequence[Sample], minibatches: int) -> list[list[int]]:
    """The samples of each minibatch, by their places: as many whole groups each, in order."""
    groups = sorted({sample.group_index for sample in samples})
    size = len(groups) // minibatches
    minibatch_of = {group: place // size for place, group in enumerate(groups)}
    found: list[list[int]] = [[] for _ in range(minibatches)]
    for index, sample in enumerate(samples):
        found[minibatch_of[sample.group_index]].append(index)
    return found


def with_gradient(examples: Sequence[Example], indices: Sequence[int]) -> list[int]:
    """The sequences of a minibatch that have an advantage somewhere.

    Where none has, the first one stays: the optimizer takes its step, and the step is measured, all the same.
    """
    return [index for index in indices if np.any(examples[index].streams["advantages"])] or list(indices[:1])


def passes_of(
    samples: Sequence[Sample], indices: Sequence[int], tokens_per_pass: int, parallel: int = 1
) -> list[list[int]]:
    """Passes of about so many tokens; at least `parallel` of them, or nearly so.

    Groups by best fit, so that each group's prompt is computed once; a group too large for a pass is cut.
    """
    total = sum(len(samples[index].rollout_log_probs) for index in indices)
    tokens_per_pass = min(tokens_per_pass, -(-total // parallel)) if parallel > 1 else tokens_per_pass
    units: list[list[int]] = []
    sizes: list[int] = []
    for index in indices:
        own = len(samples[index].rollout_log_probs)
        same = bool(units) and samples[units[-1][0]].prompt.tokens == samples[index].prompt.tokens
        if same and sizes[-1] + own <= tokens_per_pass:
            units[-1].append(index)
            sizes[-1] += own
            continue
        units.append([index])
        sizes.append(len(samples[index].prompt.tokens) + own)
    return [sorted(index for unit in chosen for index in units[unit]) for chosen in best_fit(sizes, tokens_per_pass)]


def prepare_grpo_batch(
    samples: Sequence[Sample], advantages: Sequence[float | Floats], aggregation: Aggregation = "token"
) -> TrainBatch:
    """Make a batch of all samples, in one pass. `advantages`: a number for each sample, or for each learnt token of it.

    Raises `BadInput` when no token is learnt, or when there are other advantages than samples.

    Examples:
        >>> advantages = rc.compute_advantages([reward(sample) for sample in samples], [0] * len(samples))
        >>> batch = rc.prepare_grpo_batch(samples, advantages)
        >>> batch.sequences == len(samples)
        True
    """
    if len(advantages) != len(samples):
        raise BadInput(f"advantages: there are {len(advantages)}, and {len(samples)} samples")
    examples = to_streams(samples)
    each = [np.zeros(int(example.loss_mask.sum())) + of for example, of in zip(examples, advantages, strict=True)]
    examples = with_streams(examples, "advantages", each)
    longest = max(len(of) for of in each)
    return pack_batch(examples, normalizer_of(examples, aggregation, longest))


def with_streams(examples: Sequence[Example], name: str, values: Sequence[Floats]) -> list[Example]:
    return [
        replace(example, streams={**example.streams, name: value})
        for example, value in zip(examples, values, strict=True)
    ]


def scores_of(
    examples: Sequence[Example], cuts: Cuts, score: Callable[[TrainBatch], TrainFuture[TokenScores]]
) -> tuple[list[Floats], list[Floats] | None]:
    """Log-probabilities, and a critic's values where there is one, of each example's learnt tokens."""
    logprobs: list[Floats] = [np.zeros(0)] * len(examples)
    values = list(logprobs)
    critic = False
    passes = [indices for passes in cuts for indices in passes]
    futures = [score(pack_batch([examples[index] for index in indices], 1.0)) for indices in passes]
    for indices, future in zip(passes, futures, strict=True):
        chosen, scores = [examples[index] for index in indices], future.result()
        ends = np.cumsum([len(learnt(example)) for example in chosen])[:-1]
        critic = scores.values_M is not None
        for found, wanted in ((scores.logprobs_M, logprobs), (scores.values_M, values)):
            if found is not None:
                parts = np.split(found.double().cpu().numpy(), ends)
                for index, part in zip(indices, parts, strict=True):
                    wanted[index] = part
    return logprobs, values if critic else None


def normalizer_of(examples: Sequence[Example], aggregation: Aggregation, longest: int) -> float:
    """The number that a minibatch's summed losses are divided by; see `losses.aggregate`."""
    if aggregation == "token":
        return float(max(1, learnt_tokens(examples)))
    return float(len(examples) * (longest if aggregation == "constant" else 1))
