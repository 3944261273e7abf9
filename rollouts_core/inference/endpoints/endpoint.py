"""The protocol of endpoints: they answer conversations."""

from typing import Protocol

from rollouts_core.types.episode import AgentState, Answered


class Endpoint(Protocol):
    """A model that answers conversations."""

    async def complete(self, state: AgentState, max_tokens: int | None) -> Answered:
        """The next turn, of at most so many tokens.

        Raises `EngineUnavailable`, `EngineRefused` or `MalformedAnswer` once it has tried as often as it does, and
        `ContextOverflow` where nothing more fits the model's context.
        """
