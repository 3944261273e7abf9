"""Evaluation: rows in, a result for each sample out. `evaluate` for any endpoint, `evaluate_prompts` for any answerer.

Decision: an answer that fails, or whose reward fails, is reported by row and stops no other. Nothing is estimated in
its place: shares are shares of the scored answers, and the number of answers without a score is shown beside them.
"""

import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from rollouts_core.concurrency import first_error
from rollouts_core.environments.agent import RunConfig, run_agent
from rollouts_core.environments.environment import Environment, Functions
from rollouts_core.errors import BadInput, RewardFailed, RolloutsError
from rollouts_core.evaluation.journal import EvaluationJournal
from rollouts_core.evaluation.report import EvaluationReport, report_of
from rollouts_core.evaluation.results import Result, failed_result, result_of
from rollouts_core.inference.endpoints.endpoint import Endpoint
from rollouts_core.rewards.reward import AnyReward
from rollouts_core.rewards.scoring import Scoring, ScoringSettings
from rollouts_core.rollout.episodes import Episode, last_words, status_of
from rollouts_core.rollout.groups import Answer
from rollouts_core.types import Message, Prompt, Sample
from rollouts_core.types.episode import StopReason

Answerer = Callable[[Prompt, int], Awaitable[Answer]]
"""Answers a prompt for the n-th time. Raises `RolloutsError` where it gives up."""
ToSamples = Callable[[Prompt, int, Answer], Sequence[Sample]]


@dataclass(frozen=True)
class EvaluationSettings:
    """The settings of an evaluation: how answers are sampled, scored and reported."""

    reward: AnyReward
    samples_per_prompt: int = 1
    pass_at: tuple[int, ...] = ()
    slices: tuple[str, ...] = ()
    """Columns of the rows by whose values results are told apart."""
    max_concurrent: int = 256
    scoring: ScoringSettings = field(default_factory=ScoringSettings)
    max_turns: int = 16
    max_tokens: int | None = None
    """Most tokens that the model may write, over all turns of an episode."""
    max_seconds: float = 600.0
    """Deadline of one episode."""
    tool_seconds: float = 30.0
    """Deadline of one call."""


async def evaluate(
    dataset: Iterable[Mapping[str, Any]],
    prepare_messages: Callable[[Mapping[str, Any]], Sequence[Message]] | Environment,
    endpoint: Endpoint,
    settings: EvaluationSettings,
    journal: Path | None = None,
) -> EvaluationReport:
    """Answers to every row from an endpoint, in an environment or to the messages of a function; scored and summed up.

    `journal` is a directory: the same call goes on from what is there, and asks again for what had failed. Raises
    `BadInput` when there are no rows, or none of them could be scored.
    """
    environment: Environment = Functions(prepare_messages) if callable(prepare_messages) else prepare_messages
    run = RunConfig(
        endpoint, environment, settings.max_turns, settings.max_tokens, settings.max_seconds, settings.tool_seconds
    )
    prompts = [_prompt(environment, row, place) for place, row in enumerate(dataset)]

    async def answer(prompt: Prompt, number: int) -> Answer:
        try:
            trajectory = await run_agent(environment.begin(prompt.metadata), run)
        except Exception as error:  # an environment's own code
            raise RolloutsError(f"environment: {type(error).__name__}: {error}") from error
        if trajectory.final.stop is StopReason.FAILED:
            raise RolloutsError(trajectory.final.error)
        return Episode(f"{prompt.source_row}/{number}", trajectory)

    with tempfile.TemporaryDirectory(prefix="rollouts-evaluation-") as scratch:
        kept = EvaluationJournal(journal or Path(scratch))
        results = await evaluate_prompts(prompts, answer, spoken_samples, settings, kept)
    return report_of(results, settings.pass_at, settings.slices)


async def evaluate_prompts(
    prompts: Sequence[Prompt],
    answer: Answerer,
    to_samples: ToSamples,
    settings: EvaluationSettings,
    journal: EvaluationJournal,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Result]:
    """A result for each sample of each prompt, in order. `journal` has what is there already, and is told the rest."""
    if not prompts:
        raise BadInput("there is nothing to evaluate: the data set has no rows")
    places = anyio.CapacityLimiter(settings.max_concurrent)
    scoring = Scoring(settings.reward, replace(settings.scoring, on_failure="stop"))
    found: dict[int, list[Result]] = {}

    async def of_prompt(place: int) -> None:
        asked = partial(_answered, prompts[place], answer, journal, places)
        found[place] = await _results(prompts[place], asked, to_samples, scoring, settings, journal)
        progress(len(found), len(prompts))

    try:
        with first_error():
            async with anyio.create_task_group() as tasks:
                for place in range(len(prompts)):
                    tasks.start_soon(of_prompt, place)
    finally:
        with anyio.CancelScope(shield=True):
            await scoring.aclose()
    return [result for place in range(len(prompts)) for result in found[place]]


def spoken_samples(prompt: Prompt, number: int, answer: Answer) -> list[Sample]:
    """Samples of an episode with an endpoint that gives no tokens."""
    assert isinstance(answer, Episode), "an endpoint's answers are episodes"
    final = answer.trajectory.final
    return [
        Sample(
            prompt, last_words(final), (), (), (), (), 0, status_of(final), episode=number, trajectory=answer.trajectory
        )
    ]


async def _results(
    prompt: Prompt,
    asked: Callable[[int], Awaitable[Answer | str]],
    to_samples: ToSamples,
    scoring: Scoring,
    settings: EvaluationSettings,
    journal: EvaluationJournal,
) -> list[Result]:
    numbers = range(settings.samples_per_prompt)
    known = [journal.result(prompt, number) for number in numbers]
    if all(known):
        return [result for result in known if result is not None]
    answers: dict[int, Answer | str] = {}

    async def ask(number: int) -> None:
        answers[number] = await asked(number)

    async with anyio.create_task_group() as tasks:
        for number in numbers:
            tasks.start_soon(ask, number)
    samples = {n: list(to_samples(prompt, n, a)) for n, a in sorted(answers.items()) if not isinstance(a, str)}
    scored = await _scored(samples, scoring)
    results = []
    for number in numbers:
        said = answers[number]
        results.append(scored[number] if number in scored else failed_result(prompt, number, str(said)))
    journal.scored(results)
    return results


async def _answered(
    prompt: Prompt, answer: Answerer, journal: EvaluationJournal, places: anyio.CapacityLimiter, number: int
) -> Answer | str:
    """The answer, or what went wrong."""
    if there := journal.answer(prompt, number):
        return there
    async with places:
        try:
            made = await answer(prompt, number)
        except RolloutsError as error:
            return str(error)
    journal.answered(prompt, number, made)
    return made


async def _scored(samples: Mapping[int, Sequence[Sample]], scoring: Scoring) -> dict[int, Result]:
    """The group's; where that fails, each by itself, so that one that cannot be scored takes no other with it."""
    if not samples:
        return {}
    try:
        scored = await scoring([sample for of in samples.values() for sample in of])
    except RewardFailed as error:
        if len(samples) == 1:
            return {number: result_of(of[-1], number, str(error)) for number, of in samples.items()}
        return {number: (await _scored({number: of}, scoring))[number] for number, of in samples.items()}
    return {sample.episode: result_of(sample, sample.episode) for sample in scored}


def _prompt(environment: Environment, row: Mapping[str, Any], place: int) -> Prompt:
    """Raises `BadInput`, naming the row, where the environment cannot begin with it."""
    try:
        state = environment.begin(row)
    except Exception as error:  # an environment's own code
        raise BadInput(f"row {place}: the environment cannot begin with it: {type(error).__name__}: {error}") from error
    return Prompt(state.messages, (), row, place)
