"""A group: the samples of one prompt, from the prompt's turn to a scored answer for each.

    Group       what is asked for, and what is there of it; immutable, so it can be saved, carried over, gone on with
    Outcome     what became of a group: scored samples, or why there are none
    choose      which groups make a batch

Decision: which groups make a batch of a synchronous round does not depend on which end first: those that come first in
the order of issue and are accepted. A group behind them is not needed, whatever becomes of it, and is ended at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollouts_core.environments.record import trajectory_from_data, trajectory_to_data
from rollouts_core.inference.engine import Completion, GenerationRequest
from rollouts_core.inference.sampling import request_seed
from rollouts_core.rollout.episodes import Episode, episode_samples
from rollouts_core.rollout.settings import RolloutConfig
from rollouts_core.types import Prompt, Sample, Status

Answer = Completion | Episode
STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


@dataclass(frozen=True)
class Group:
    round: int
    """The batch it was issued for, counted from 1."""
    place: int
    """The group's number among those that were begun for the batch."""
    repeat: int
    """How often its prompt was issued for that batch before."""
    prompt: Prompt
    answers: tuple[Answer | None, ...]
    """Per sample: what is there so far; finish reason 'abort' means that it goes on."""

    @property
    def name(self) -> str:
        return f"{self.round}/{self.place}"

    @property
    def is_answered(self) -> bool:
        return all(answer is not None and answer.finish_reason != "abort" for answer in self.answers)

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version of all its tokens."""
        versions = [version for answer in self.answers if answer for version in answer.weight_versions]
        return min(versions, default=None)

    def with_answer(self, number: int, answer: Answer | None) -> "Group":
        answers = (*self.answers[:number], answer, *self.answers[number + 1 :])
        return replace(self, answers=answers)


@dataclass(frozen=True)
class Outcome:
    """Accepted when `refused` is empty."""

    group: Group
    samples: tuple[Sample, ...] = ()
    refused: str = ""
    """A filter's name, or what failed."""

    @property
    def filled(self) -> int:
        """Samples that ended by themselves."""
        return sum(sample.status == Status.COMPLETED for sample in self.samples)


@dataclass(frozen=True)
class Choice:
    chosen: tuple[Outcome, ...]
    """The batch, once it is whole."""
    lacking: int
    """How many more groups must be issued."""


def choose(outcomes: Mapping[int, Outcome], issued: int, wanted: int) -> Choice:
    """The first accepted groups in the order of issue, as far as everything before them is decided."""
    decided = True
    accepted: list[Outcome] = []
    pending = 0
    for place in range(issued):
        outcome = outcomes.get(place)
        if outcome is None:
            decided = False
            pending += 1
        elif not outcome.refused and len(accepted) < wanted:
            accepted.append(outcome)
        if decided and len(accepted) == wanted:
            return Choice(tuple(accepted), 0)
    return Choice((), max(0, wanted - len(accepted) - pending))


def best_filled(outcomes: Sequence[Outcome], wanted: int) -> list[Outcome]:
    """The `wanted` groups with most samples that ended by themselves; among equals, those that have waited
    longest."""
    order = sorted(range(len(outcomes)), key=lambda place: (-outcomes[place].filled, place))[:wanted]
    return [outcomes[place] for place in sorted(order)]


def request_for(group: Group, number: int, config: RolloutConfig, stop: tuple[int, ...]) -> GenerationRequest:
    """The request for the rest of a sample. Its random draws follow from (seed, round, row, number of the sample)."""
    answer = group.answers[number]
    return GenerationRequest(
        request_id=f"{group.name}/{number}",
        prompt_tokens=group.prompt.tokens,
        max_new_tokens=config.max_new_tokens,
        stop_token_ids=stop,
        temperature=config.temperature,
        truncation=config.truncation,
        stop=config.stop,
        seed=seed_of(group, number, config),
        generated=answer.tokens if isinstance(answer, Completion) else (),
        session=group.name,
    )


def seed_of(group: Group, number: int, config: RolloutConfig) -> int:
    numbered_on = group.repeat * config.n_samples_per_prompt + number
    return request_seed(config.seed, group.round, group.prompt.source_row, numbered_on)


def to_samples(group: Group, tokenizer: Any) -> list[Sample]:
    """An answered group's samples, unscored. `group_index` is the group's place among those issued."""
    answers = ((number, answer) for number, answer in enumerate(group.answers) if answer is not None)
    return [sample for pair in answers for sample in answer_samples(group.prompt, group.place, *pair, tokenizer)]


def answer_samples(prompt: Prompt, group_index: int, number: int, answer: Answer, tokenizer: Any) -> list[Sample]:
    """An answer's samples, unscored: one, unless it is an episode that was rendered anew in between."""
    if isinstance(answer, Episode):
        return episode_samples(prompt, group_index, number, answer)
    text = tokenizer.decode(list(answer.tokens), skip_special_tokens=True)
    return [to_sample(prompt, group_index, answer, text, number)]


def to_sample(prompt: Prompt, group_index: int, answer: Completion, text: str, number: int = 0) -> Sample:
    return Sample(
        prompt=prompt,
        response=text,
        tokens=prompt.tokens + answer.tokens,
        loss_mask=(0,) * len(prompt.tokens) + (1,) * len(answer.tokens),
        rollout_log_probs=answer.log_probs,
        weight_versions=answer.weight_versions,
        group_index=group_index,
        status=STATUS[answer.finish_reason],
        episode=number,
        experts=answer.experts,
    )


def group_to_data(group: Group) -> dict[str, Any]:
    """A group as JSON data, with the row of its prompt."""
    answers = [answer_to_data(answer) if answer else None for answer in group.answers]
    place = {"round": group.round, "place": group.place, "repeat": group.repeat}
    return {**place, "row": group.prompt.source_row, "answers": answers}


def group_from_data(data: Mapping[str, Any], prompts: Mapping[int, Prompt]) -> Group:
    answers = tuple(answer_from_data(answer) if answer else None for answer in data["answers"])
    return Group(data["round"], data["place"], data["repeat"], prompts[data["row"]], answers)


def answer_to_data(answer: Answer) -> dict[str, Any]:
    if isinstance(answer, Completion):
        return vars(answer)
    half = vars(answer.half) if answer.half else None
    return {"request_id": answer.request_id, "trajectory": trajectory_to_data(answer.trajectory), "half": half}


def answer_from_data(data: Mapping[str, Any]) -> Answer:
    if "trajectory" not in data:
        return _completion_from_data(data)
    half = _completion_from_data(data["half"]) if data["half"] else None
    return Episode(data["request_id"], trajectory_from_data(data["trajectory"]), half)


def _completion_from_data(data: Mapping[str, Any]) -> Completion:
    return Completion(
        data["request_id"],
        tuple(data["tokens"]),
        tuple(data["log_probs"]),
        tuple(data["weight_versions"]),
        data["finish_reason"],
        data.get("experts", ""),
    )
