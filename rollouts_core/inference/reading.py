"""Reads what other programs answer. Whatever is wrong with an answer is raised as `MalformedAnswer`.

Decision: an answer is read by the code that uses it, inside `reading`, and not checked against a schema before. A
server may say more than it is asked for, and answers with thousands of numbers are read once.

Imports no torch: agents read answers too.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollouts_core.errors import MISSHAPEN, MalformedAnswer

QUOTED = 500
"""Characters of an answer that are quoted in an error."""


def json_in(content: str | bytes, where: str) -> Any:
    """The data of JSON text. `where` names who answered what. Raises `MalformedAnswer`."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise MalformedAnswer(f"{where}: this is not JSON: {content[:QUOTED]!r}") from None


@contextmanager
def reading(where: str, answer: Any) -> Iterator[None]:
    """Around the code that takes an answer apart. Raises `MalformedAnswer` with the answer's first characters."""
    try:
        yield
    except MISSHAPEN as error:
        raise MalformedAnswer(f"{where}: {error!r} in the answer {str(answer)[:QUOTED]}") from None


def text_of(value: Any) -> str:
    """A text, or an empty one where there is none. Raises TypeError."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"a text is expected instead of {str(value)[:100]}")
    return value or ""


def count_of(value: Any) -> int:
    """A number of tokens, or 0 where none is told. Raises TypeError."""
    if value is not None and not isinstance(value, int):
        raise TypeError(f"a number is expected instead of {str(value)[:100]}")
    return value or 0
