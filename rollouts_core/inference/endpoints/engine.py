"""An engine as an endpoint: conversations in, turns out. Tokens are never encoded twice.

Decision: the tokens that an episode's engine was given and generated are in the episode's own state
(`AgentState.sampled`). So the endpoint holds no state: an episode can continue from any of its states, with exactly the
tokens that led there.
"""

import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from rollouts_core.data.turns import Given, TurnFormat, first_tokens, next_tokens, read_turn
from rollouts_core.errors import BadInput, ContextOverflow, MalformedAnswer, RolloutsError
from rollouts_core.inference.engine import EVERYTHING, Completion, GenerationRequest, Truncation, joined
from rollouts_core.inference.sampling import request_seed
from rollouts_core.inference.told_experts import behind, from_text
from rollouts_core.types.episode import AgentState, Answered, Sampled, Usage

Tokens = tuple[int, ...]
PIECE = 16
"""Tokens that a stream asks for at once, where the engine's answers can't be followed."""
SHOWN_PER_READ = 64
"""An answer of so many tokens is read again when there is one more, a longer one when it is so much longer."""
HALF_SAID = re.compile(r"(\ufffd+|[<\[{][^>\]}]*)$")
"""Text that may become a character, or the beginning of a call."""


class TurnAborted(RolloutsError):
    """A turn was ended from outside; `there` is what there is of it."""

    def __init__(self, there: Completion) -> None:
        super().__init__(f"request {there.request_id} was aborted after {len(there.tokens)} tokens")
        self.there = there


@dataclass(frozen=True)
class EngineEndpoint:
    """The policy of an engine, for one episode. Fits `Endpoint`."""

    generate: Callable[[GenerationRequest], Awaitable[Completion]]
    """An engine's own, or one that tries again."""
    form: TurnFormat
    max_length: int
    """The context, in tokens."""
    name: str
    """Name of the episode; no two at a time have the same."""
    seed: int
    """The seed of all random draws of the episode."""
    temperature: float = 1.0
    truncation: Truncation = EVERYTHING
    stop: tuple[str, ...] = ()
    """Texts that end a turn."""
    prompt: Tokens = ()
    """The episode's beginning as tokens, where it is encoded already."""
    follow: Callable[[GenerationRequest], AsyncGenerator[Completion]] | None = None
    """An engine's answer as it grows, its last item whole; None: streams ask for one piece behind the other."""

    async def complete(self, state: AgentState, max_tokens: int | None) -> Answered:
        """Raises what `generate` raises, `ContextOverflow` where no token fits, `MalformedAnswer` where the chat
        template cannot render what was said, and `TurnAborted`."""
        given, request = self._asked(state, max_tokens)
        return self._answered(state, given, request, await self.generate(request))

    async def stream(self, state: AgentState, max_tokens: int | None) -> AsyncIterator[str | Answered]:
        """Yield the text as it comes, then the whole turn. It is the turn of `complete` if the engine honours seeds.

        Raises as `complete` does.
        """
        given, request = self._asked(state, max_tokens)
        made, told, read = None, "", 0
        async with aclosing((self.follow or self._in_pieces)(request)) as parts:
            async for made in parts:
                if len(made.tokens) <= read + read // SHOWN_PER_READ:
                    continue
                read = len(made.tokens)
                said = HALF_SAID.sub("", read_turn(self.form, made.tokens, state.turn_idx).content)
                if said.startswith(told) and said != told:
                    yield said[len(told) :]
                    told = said
        assert made is not None, "an answer's last item is there even where it has no token"
        answered = self._answered(state, given, request, made)
        if (rest := answered.message.content.removeprefix(told)) and answered.message.content.startswith(told):
            yield rest
        yield answered

    async def _in_pieces(self, request: GenerationRequest) -> AsyncGenerator[Completion]:
        """Ask for the answer in pieces: each is a request that continues the tokens so far, which the engine may have
        cached."""
        made = await self.generate(replace(request, max_new_tokens=min(request.max_new_tokens, PIECE)))
        while made.finish_reason == "length" and len(made.tokens) < request.max_new_tokens:
            yield made
            upto = min(request.max_new_tokens, len(made.tokens) + PIECE)
            made = joined(made, await self.generate(replace(request, max_new_tokens=upto, generated=made.tokens)))
        yield made

    def _asked(self, state: AgentState, max_tokens: int | None) -> tuple[Given, GenerationRequest]:
        given = self._given(state)
        before = (*tokens_so_far(state), *given.tokens) if given.continues else given.tokens
        room = self.max_length - len(before)
        limit = room if max_tokens is None else min(room, max_tokens)
        if limit <= 0:
            raise ContextOverflow(f"the episode has {len(before)} tokens, and the context {self.max_length}")
        return given, GenerationRequest(
            request_id=self.name,
            prompt_tokens=before,
            max_new_tokens=limit,
            stop_token_ids=self.form.stop,
            temperature=self.temperature,
            truncation=self.truncation,
            stop=self.stop,
            seed=request_seed(self.seed, state.turn_idx),
            session=self.name,
        )

    def _answered(self, state: AgentState, given: Given, request: GenerationRequest, made: Completion) -> Answered:
        if made.finish_reason == "abort":
            raise TurnAborted(made)
        sampled = Sampled(
            given.tokens,
            made.tokens,
            made.log_probs,
            made.weight_versions,
            given.continues,
            given.differs,
            behind(told_so_far(state) if given.continues else 0, made.experts),
        )
        message = read_turn(self.form, made.tokens, state.turn_idx)
        usage = Usage(len(request.prompt_tokens), len(made.tokens))
        return Answered(message, usage, cut_off=made.finish_reason == "length", sampled=sampled)

    def _given(self, state: AgentState) -> Given:
        if state.sampled:
            try:
                return next_tokens(self.form, state.messages, tokens_so_far(state))
            except BadInput as error:  # templates raise for some answers of models
                raise MalformedAnswer(str(error)) from error
        return Given(self.prompt or first_tokens(self.form, state.messages), continues=False, differs=False)


def told_so_far(state: AgentState) -> int:
    """Bytes of experts that the turns of the last sequence have told."""
    told = 0
    for turn in state.sampled:
        told = (told if turn.continues else 0) + len(from_text(turn.experts))
    return told


def tokens_so_far(state: AgentState) -> Tokens:
    """The tokens of the conversation up to the end of its last turn, as the engine has them."""
    tokens: Tokens = ()
    for turn in state.sampled:
        tokens = (*(tokens if turn.continues else ()), *turn.given, *turn.tokens)
    return tokens
