"""Samples from an engine in this process, synchronously: `generate_samples`, and `generate_rollout_batches` for ever.

The asynchronous way, over any engine, is `rollouts_core.rollout.manager`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rollouts_core.data.prompts import DataBuffer
from rollouts_core.data.turns import stop_tokens
from rollouts_core.inference.torch_engine import TorchEngine
from rollouts_core.rewards.scoring import compute_reward, rewarded
from rollouts_core.rollout.groups import Group, request_for, to_sample
from rollouts_core.rollout.settings import RolloutConfig
from rollouts_core.types import Prompt, Sample


def generate_samples(
    engine: TorchEngine, tokenizer: Any, prompts: Sequence[Prompt], config: RolloutConfig, step: int = 0
) -> list[Sample]:
    """`n_samples_per_prompt` answers to each prompt, unscored; a prompt's answers follow one another.

    A sample's draws follow from (seed, step, prompt's row, number of the sample) alone. Where a batch wraps around an
    epoch, a prompt may stand in it twice; its samples are then numbered on.

    Examples:
        >>> found = rc.generate_samples(engine, policy.tokenizer, prompts[:2], sampling, step=1)
        >>> len(found) == 2 * sampling.n_samples_per_prompt
        True
    """
    groups = new_groups(prompts, step, 0, config.n_samples_per_prompt)
    stop = stop_tokens(tokenizer)
    numbers = range(config.n_samples_per_prompt)
    completions = engine.generate([request_for(group, number, config, stop) for group in groups for number in numbers])
    texts = tokenizer.batch_decode([completion.tokens for completion in completions], skip_special_tokens=True)
    places = [(group, number) for group in groups for number in numbers]
    return [
        to_sample(group.prompt, group.place, completion, text, number)
        for (group, number), completion, text in zip(places, completions, texts, strict=True)
    ]


def generate_rollout_batches(
    engine: TorchEngine,
    tokenizer: Any,
    data_buffer: DataBuffer,
    reward: Callable[[Sample], float],
    config: RolloutConfig,
) -> Iterator[tuple[list[Sample], DataBuffer]]:
    """Scored batches, endlessly, each with the buffer after it. The engine's weights may change in between."""
    step = 0
    while True:
        prompts, data_buffer = data_buffer.get_prompts(config.batch_size)
        samples = generate_samples(engine, tokenizer, prompts, config, step)
        yield [rewarded(sample, compute_reward(sample, reward, config.scoring.name)) for sample in samples], data_buffer
        step += 1


def new_groups(
    prompts: Sequence[Prompt], round_number: int, first_place: int, n_samples: int, seen: Counter[int] | None = None
) -> list[Group]:
    """A group for each prompt. `seen` counts how often each row was issued for this round, and is added to."""
    seen = Counter() if seen is None else seen
    groups = []
    for offset, prompt in enumerate(prompts):
        row = prompt.source_row
        groups.append(Group(round_number, first_place + offset, seen[row], prompt, (None,) * n_samples))
        seen[row] += 1
    return groups
