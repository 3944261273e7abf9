"""A game of several turns: guess a number, and hear whether it is higher or lower."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollouts_core.environments.environment import Functions
from rollouts_core.types import Message
from rollouts_core.types.episode import AgentState, Replied

NUMBER = re.compile(r"-?\d+")


def guess_number(most_guesses: int = 10) -> Functions:
    """Rows have the `number`, and may have `low` and `high` (1 and 100)."""

    def reply(message: Message, state: AgentState) -> Replied:
        known = state.environment
        guesses = known["guesses"] + 1
        found = NUMBER.findall(message.content)
        if found and int(found[-1]) == known["number"]:
            return Replied(changes={"guesses": guesses, "solved": True}, ends=True)
        if guesses >= most_guesses:
            return Replied(changes={"guesses": guesses}, ends=True)
        told = "no number" if not found else "higher" if int(found[-1]) < known["number"] else "lower"
        return Replied((Message("user", told),), {"guesses": guesses})

    return Functions(_messages, reply=reply, knows=_knows)


def _messages(row: Mapping[str, Any]) -> Sequence[Message]:
    return [Message("user", f"Guess my number between {row.get('low', 1)} and {row.get('high', 100)}.")]


def _knows(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"number": int(row["number"]), "guesses": 0, "solved": False}
