"""Episodes of a policy in training: played turn by turn, continued after an abort, and made into samples.

Decision: a sample is a sequence of tokens as the engine had them. Turns that continue one another are one sequence, and
observations between them are masked. A turn before which the conversation was rendered again begins another sequence.
All sequences of an episode share its reward.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rollouts_core.data.turns import TurnFormat
from rollouts_core.environments.agent import RunConfig, next_event
from rollouts_core.environments.environment import Environment
from rollouts_core.errors import RolloutsError
from rollouts_core.inference.endpoints.engine import EngineEndpoint, TurnAborted
from rollouts_core.inference.engine import Completion, FinishReason, GenerationRequest
from rollouts_core.inference.told_experts import from_text, to_text
from rollouts_core.rollout.answers import SampleFailed
from rollouts_core.rollout.settings import RolloutConfig
from rollouts_core.types import Message, Prompt, Sample, Status
from rollouts_core.types.episode import AgentState, Sampled, StopReason, Trajectory

CUT_SHORT = (StopReason.LENGTH, StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.MAX_SECONDS)


@dataclass(frozen=True)
class Acting:
    """The environment that a policy acts in, and the limits of an episode."""

    environment: Environment
    form: TurnFormat
    max_length: int
    """The context, in tokens."""
    max_turns: int
    tool_seconds: float


@dataclass(frozen=True)
class Episode:
    """An episode so far: an answer of several turns."""

    request_id: str
    trajectory: Trajectory
    half: Completion | None = None
    """The unfinished part of a turn."""

    @property
    def finish_reason(self) -> FinishReason:
        """How the episode ended; 'abort' if it goes on."""
        stop = self.trajectory.final.stop
        return "abort" if stop is None else "length" if stop in CUT_SHORT else "stop"

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """Weight versions of every token that the policy made."""
        made = [version for turn in self.trajectory.final.sampled for version in turn.weight_versions]
        return (*made, *(self.half.weight_versions if self.half else ()))


Ask = Callable[[GenerationRequest, Completion | None], Awaitable[Completion]]
"""Asks for an answer, given the part of it that exists. Raises `SampleFailed`."""


async def play(
    acting: Acting,
    ask: Ask,
    prompt: Prompt,
    name: str,
    seed: int,
    before: Episode | None,
    config: RolloutConfig,
    stopping: Callable[[], bool] = lambda: False,
) -> Episode:
    """An episode to its end; aborted from outside, or when `stopping`, what there is of it.

    `config.max_new_tokens` is what the policy may write over all turns, `config.sample_seconds` what it may take.
    Raises `SampleFailed` when there is no answer, or the environment's own methods raise.
    """
    there = before or Episode(name, Trajectory(begin(acting.environment, prompt)))
    halves = [there.half] if there.half else []

    async def generate(request: GenerationRequest) -> Completion:
        half = halves.pop() if halves else None
        return await ask(replace(request, generated=half.tokens) if half else request, half)

    endpoint = EngineEndpoint(
        generate, acting.form, acting.max_length, name, seed, config.temperature, config.truncation, config.stop,
        prompt.tokens,
    )  # fmt: skip
    run = RunConfig(
        endpoint,
        acting.environment,
        acting.max_turns,
        config.max_new_tokens,
        config.sample_seconds,
        acting.tool_seconds,
    )
    while there.trajectory.final.stop is None and not stopping():
        try:
            event = await next_event(there.trajectory.final, run)
        except TurnAborted as aborted:
            return replace(there, half=aborted.there)
        except RolloutsError:
            raise
        except Exception as error:  # the environment's own code
            raise SampleFailed(f"environment: {type(error).__name__}: {error}") from error
        there = Episode(name, there.trajectory.followed_by(event))
    final = there.trajectory.final
    if final.stop is not None and not final.sampled:
        raise SampleFailed(f"{final.stop}: {name} ended without an answer: {final.error or 'its time was over'}")
    return there


def begin(environment: Environment, prompt: Prompt) -> AgentState:
    """The first state of a prompt's row. Raises `SampleFailed` where the environment fails, or begins otherwise than
    when the data were tokenized."""
    try:
        state = environment.begin(prompt.metadata)
    except Exception as error:
        raise SampleFailed(f"environment: its begin raised {type(error).__name__}: {error}") from error
    if state.messages != prompt.messages:
        raise SampleFailed("environment: its begin gives other messages for the same row than when it was tokenized")
    return state


def episode_samples(prompt: Prompt, group_index: int, number: int, episode: Episode) -> list[Sample]:
    """The sequences of an episode, unscored; most have one."""
    final = episode.trajectory.final
    return [_sample(turns, prompt, group_index, number, episode.trajectory) for turns in _sequences(final.sampled)]


def status_of(state: AgentState) -> Status:
    if state.stop is StopReason.FAILED:
        return Status.FAILED
    return Status.TRUNCATED if state.stop in CUT_SHORT else Status.COMPLETED


def last_words(state: AgentState) -> str:
    """The content of the assistant's last message."""
    said: list[Message] = [message for message in state.messages if message.role == "assistant"]
    return said[-1].content if said else ""


def _sequences(turns: tuple[Sampled, ...]) -> Iterator[list[Sampled]]:
    begins = [place for place, turn in enumerate(turns) if not turn.continues]
    yield from (list(turns[start:end]) for start, end in pairwise([*begins, len(turns)]))


def _sample(turns: Sequence[Sampled], prompt: Prompt, group_index: int, number: int, whole: Trajectory) -> Sample:
    first, *further = turns
    tokens, mask = [*first.given, *first.tokens], [0] * len(first.given) + [1] * len(first.tokens)
    log_probs, versions = list(first.log_probs), list(first.weight_versions)
    for turn in further:
        tokens += (*turn.given, *turn.tokens)
        mask += [0] * len(turn.given) + [1] * len(turn.tokens)
        log_probs += (*(0.0,) * len(turn.given), *turn.log_probs)
        versions += (*versions[-1:] * len(turn.given), *turn.weight_versions)
    return Sample(
        prompt=prompt if first.given == prompt.tokens else replace(prompt, tokens=first.given),
        response=last_words(whole.final),
        tokens=tuple(tokens),
        loss_mask=tuple(mask),
        rollout_log_probs=tuple(log_probs),
        weight_versions=tuple(versions),
        group_index=group_index,
        status=status_of(whole.final),
        episode=number,
        trajectory=whole,
        experts=to_text(b"".join(from_text(turn.experts) for turn in turns)) if turns[-1].experts else "",
    )
