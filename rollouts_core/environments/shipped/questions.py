"""Questions with an answer each: one turn, no tools."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollouts_core.data.messages import message_from_data
from rollouts_core.environments.environment import Functions
from rollouts_core.types import Message


def questions(question: str = "question", system: str = "") -> Functions:
    """Rows have `messages`, a closing answer left out, or text under `question` or "prompt"; `system` goes before."""

    def messages(row: Mapping[str, Any]) -> Sequence[Message]:
        before = [Message("system", system)] if system else []
        if row.get("messages"):
            asked = [message_from_data(message) for message in row["messages"]]
            return [*before, *(asked[:-1] if asked[-1].role == "assistant" else asked)]
        name = "prompt" if question not in row and "prompt" in row else question
        return [*before, Message("user", str(row[name]))]

    return Functions(messages)
