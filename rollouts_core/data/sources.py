"""Rows to learn from, checked one by one, whatever file they stand in.

A row is one of these. A conversation: `messages` with a known `role` and a text `content` each, and perhaps `tools`.
Plain text: `prompt` and `completion`, or `prompt` alone, or `text`. A preference: `chosen` and `rejected`, which follow
a `prompt` or begin with it. Prompt and answers may be messages, too. Each row may have another form. Further columns
become metadata, which rewards read. Problems name the file and the line, and are reported together.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from rollouts_core.config import Source
from rollouts_core.data.files import RawRow, raw_rows
from rollouts_core.data.layouts import recognised
from rollouts_core.data.messages import message_from_data, messages_problem, tools_from_data, tools_problem
from rollouts_core.errors import BadInput
from rollouts_core.store.identity import External
from rollouts_core.types import Data, Message

ANSWERS = ("completion", "text", "chosen", "rejected")
SPLIT = ("prompt", *ANSWERS)
"""Fields that replace `messages`, each as text or as messages."""
MAX_PROBLEMS = 20
"""Most kinds of problems that are told together, and most faulty rows that are read."""
FIRST_PLACES = 3


@dataclass(frozen=True)
class Row:
    messages: tuple[Message, ...]
    """Empty for plain text."""
    metadata: Mapping[str, Any]
    source_row: int
    """Counted from 0."""
    place: str
    """File and line for messages to people."""
    plain: tuple[str, str] = ("", "")
    """For plain text: the given text, and the text after it, which is learnt."""
    tools: tuple[Data, ...] = ()
    """The tools that the assistant may call, in the form that templates read."""
    given: int = 0
    """How many first messages only ask: nothing of them is learnt."""
    rejected: "Row | None" = None
    """For a preference, which ends with the chosen answer: the same with the rejected answer."""


@dataclass(frozen=True)
class FaultyRow:
    place: str
    problem: str

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}"


class FaultyRows(BadInput):
    """Rows that cannot be used. What is wrong with many is told once, with the first of them."""

    def __init__(self, rows: Sequence[FaultyRow], further: Sequence[str] = ()) -> None:
        self.rows = tuple(rows)
        lines = told(rows)
        more = [f"and {len(lines) - MAX_PROBLEMS} problems more"] if len(lines) > MAX_PROBLEMS else []
        super().__init__([*lines[:MAX_PROBLEMS], *more, *further], "data")


def told(rows: Sequence[FaultyRow]) -> list[str]:
    """A line for each thing that is wrong."""
    places: dict[str, list[str]] = {}
    for row in rows:
        places.setdefault(row.problem, []).append(row.place)
    return [f"{_first_of(found)}: {problem}" for problem, found in places.items()]


def _first_of(places: Sequence[str]) -> str:
    """The first places, without what they share with the first one before the row's number; and how many more."""
    first = places[0]
    cut = first.rstrip("0123456789")
    named = [first, *(place.removeprefix(cut) for place in places[1:FIRST_PLACES])]
    more = len(places) - FIRST_PLACES
    return ", ".join(named) + (f" and {more:,} more rows" if more > 0 else "")


@dataclass(frozen=True)
class RowShard:
    number: int
    count: int
    """Number of all its rows, good or not."""
    rows: tuple[Row, ...]
    faulty: tuple[FaultyRow, ...]


Begin = Callable[[Mapping[str, Any]], tuple[Sequence[Message], Sequence[Data]]]
"""Makes the first messages, and the tools there are, of a row that may be anything."""


def load_rows(source: Source, external: External, begin: Begin | None = None) -> list[Row]:
    """All rows of a source. Raises `FaultyRows`, and `BadInput` where there are none."""
    rows = _good(read_rows(source, external, begin))
    if not rows:
        raise BadInput(f"{external.location or source}: the data set is empty")
    return rows


def rows_of(values: Iterable[Mapping[str, Any]], name: str, begin: Begin | None = None) -> list[Row]:
    """Rows that are there already. Raises `FaultyRows`, which call them by `name` and number."""
    raw = (RawRow(index, f"{name}, row {index}", dict(value)) for index, value in enumerate(values))
    return _good(_checked(row, begin) for row in raw)


def _good(found: Iterable[Row | FaultyRow]) -> list[Row]:
    found = list(found)
    rows = [row for row in found if isinstance(row, Row)]
    if faulty := [row for row in found if isinstance(row, FaultyRow)]:
        raise FaultyRows(faulty)
    return rows


def read_rows(source: Source, external: External, begin: Begin | None = None) -> Iterator[Row | FaultyRow]:
    """The rows of a source, read one at a time. Raises `BadInput` as `raw_rows` does."""
    return (_checked(raw, begin) for raw in raw_rows(source, external, lambda index: True))


def row_shards(
    source: Source,
    external: External,
    size: int,
    wanted: Callable[[int], bool] = lambda shard: True,
    begin: Begin | None = None,
) -> Iterator[RowShard]:
    """The rows of a source in shards of `size` rows; a shard that is not wanted has no content.

    Raises `BadInput` as `raw_rows` does.
    """
    raw = raw_rows(source, external, lambda index: wanted(index // size))
    for number, group in groupby(raw, lambda row: row.index // size):
        members = list(group)
        rows = [_checked(row, begin) for row in members] if wanted(number) else []
        good = tuple(row for row in rows if isinstance(row, Row))
        yield RowShard(number, len(members), good, tuple(row for row in rows if isinstance(row, FaultyRow)))


def _checked(raw: RawRow, begin: Begin | None) -> Row | FaultyRow:
    if begin is not None and not raw.problem:
        return _begun(raw, begin)
    raw = raw if raw.problem else replace(raw, value=recognised(raw.value))
    problem = raw.problem or _problem(raw.value)
    return FaultyRow(raw.place, problem) if problem else _row(raw)


def _begun(raw: RawRow, begin: Begin) -> Row | FaultyRow:
    """The row with the first messages that the environment makes. It gets the row as JSON data, as episodes will."""
    row = json.loads(json.dumps(raw.value, default=str))
    try:
        messages, tools = begin(row)
    except Exception as error:  # an environment's own code
        return FaultyRow(raw.place, f"the environment cannot begin with it: {type(error).__name__}: {error}")
    if not messages or messages[-1].role == "assistant":
        return FaultyRow(raw.place, "the environment begins with no message, or with the assistant's")
    return Row(tuple(messages), row, raw.index, raw.place, tools=tuple(tools))


def _problem(value: Data) -> str:
    split = {name: value[name] for name in SPLIT if value.get(name) is not None}
    if value.get("messages") is not None or not split:
        return messages_problem(value.get("messages")) or tools_problem(value.get("tools"))
    if ("chosen" in split) != ("rejected" in split):
        return "has one of 'chosen' and 'rejected', and a preference is both"
    texts = [name for name, entry in split.items() if isinstance(entry, str)]
    others = [name for name in split if name not in texts]
    if texts and others:
        return f"{others[0]!r} is not text, as {texts[0]!r} is"
    problems = (messages_problem(split[name], name) for name in others)
    return next(filter(None, problems), "") or _preference_problem(split) or tools_problem(value.get("tools"))


def _preference_problem(split: Data) -> str:
    if "chosen" not in split:
        return ""
    if split["chosen"] == split["rejected"]:
        return "'chosen' and 'rejected' are the same"
    if "prompt" not in split and not isinstance(split["chosen"], str) and not _given(split):
        return "'chosen' and 'rejected' begin with different messages, and there is no 'prompt'"
    return ""


def _row(raw: RawRow) -> Row:
    value: Data = raw.value
    told_apart = () if value.get("messages") is not None else SPLIT
    rest = {name: entry for name, entry in value.items() if name not in ("messages", "tools", *told_apart)}
    tools = tools_from_data(value.get("tools"))
    if not told_apart:
        return Row(_messages(value["messages"]), rest, raw.index, raw.place, tools=tools)
    rejected = _split_row(value, ("rejected",), Row((), rest, raw.index, raw.place, tools=tools))
    chosen = _split_row(value, ("chosen", "completion", "text"), rejected)
    return replace(chosen, rejected=rejected) if value.get("chosen") is not None else chosen


def _split_row(value: Data, answers: Sequence[str], row: Row) -> Row:
    """The row with its prompt and the first of the fields `answers` that it has."""
    asked, answer = value.get("prompt"), next((value[name] for name in answers if value.get(name)), None)
    if isinstance(asked or answer, str):
        return replace(row, plain=(asked or "", answer or ""))
    given = len(asked) if asked is not None else _given(value)
    return replace(row, messages=_messages([*(asked or ()), *(answer or ())]), given=given)


def _given(value: Data) -> int:
    """How many first messages the two answers share, where no prompt is told apart."""
    chosen, rejected = value.get("chosen") or (), value.get("rejected") or ()
    pairs = enumerate(zip(chosen, rejected, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(chosen), len(rejected)))


def _messages(data: Sequence[Data]) -> tuple[Message, ...]:
    return tuple(message_from_data(message) for message in data)
