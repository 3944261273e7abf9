"""From prompts to samples: `generate_samples` for one batch, `generate_rollout_batches` for an endless stream."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollouts_core.data.prompts import DataBuffer
from rollouts_core.inference.engine import Completion, GenerationRequest, InferenceEngine
from rollouts_core.inference.sampling import request_seed
from rollouts_core.rollout.journal import RolloutJournal
from rollouts_core.types import Prompt, Sample, Status

STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


@dataclass(frozen=True)
class RolloutConfig:
    """How a batch of samples is generated."""

    batch_size: int
    """Prompts."""
    n_samples_per_prompt: int
    max_new_tokens: int
    temperature: float
    seed: int


def generate_samples(
    engine: InferenceEngine,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    config: RolloutConfig,
    step: int = 0,
    journal: RolloutJournal | None = None,
) -> list[Sample]:
    """`n_samples_per_prompt` answers to each prompt, unscored; a prompt's answers follow one another.

    A sample's draws follow from (seed, step, prompt's row, number of the sample) alone. Where a batch wraps around an
    epoch, a prompt may stand in it twice; its samples are then numbered on. What the journal holds of this step is not
    generated again, and what ends is noted there.
    """
    requests = _requests(prompts, config, step, (tokenizer.eos_token_id,))
    finished = journal.finished(step, engine.weight_version) if journal else {}
    for completion in engine.stream([request for request in requests if request.request_id not in finished]):
        finished[completion.request_id] = completion
        if journal:
            journal.note(step, completion)
    completions = [finished[request.request_id] for request in requests]
    texts = tokenizer.batch_decode([completion.tokens for completion in completions], skip_special_tokens=True)
    return [
        _sample(prompts[index // config.n_samples_per_prompt], index // config.n_samples_per_prompt, completion, text)
        for index, (completion, text) in enumerate(zip(completions, texts, strict=True))
    ]


def generate_rollout_batches(
    engine: InferenceEngine,
    tokenizer: Any,
    data_buffer: DataBuffer,
    score: Callable[[list[Sample]], list[Sample]],
    config: RolloutConfig,
) -> Iterator[tuple[list[Sample], DataBuffer]]:
    """Scored batches without end, each with the buffer behind it; the engine's weights may change in between."""
    step = 0
    while True:
        prompts, data_buffer = data_buffer.get_prompts(config.batch_size)
        yield score(generate_samples(engine, tokenizer, prompts, config, step)), data_buffer
        step += 1


def _requests(
    prompts: Sequence[Prompt], config: RolloutConfig, step: int, stop: tuple[int, ...]
) -> list[GenerationRequest]:
    requests = []
    seen: Counter[int] = Counter()
    for group, prompt in enumerate(prompts):
        for number in range(config.n_samples_per_prompt):
            numbered_on = seen[prompt.source_row] * config.n_samples_per_prompt + number
            requests.append(
                GenerationRequest(
                    request_id=f"{step}/{group}/{number}",
                    prompt_tokens=prompt.tokens,
                    max_new_tokens=config.max_new_tokens,
                    stop_token_ids=stop,
                    temperature=config.temperature,
                    seed=request_seed(config.seed, step, prompt.source_row, numbered_on),
                )
            )
        seen[prompt.source_row] += 1
    return requests


def _sample(prompt: Prompt, group: int, completion: Completion, text: str) -> Sample:
    return Sample(
        prompt=prompt,
        response=text,
        tokens=prompt.tokens + completion.tokens,
        loss_mask=(0,) * len(prompt.tokens) + (1,) * len(completion.tokens),
        rollout_log_probs=completion.log_probs,
        weight_versions=completion.weight_versions,
        group_index=group,
        status=STATUS[completion.finish_reason],
    )
