"""Rows to learn from, checked one by one, whatever file they stand in.

A row is a conversation, `messages` with a known `role` and a text `content` each, and perhaps `tools`; or plain text,
`prompt` and `completion`, or `prompt` alone, or `text`. Which it is, is seen row by row. Further columns become
metadata, which rewards read. Problems name the file and the line, and are reported together.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rollouts_core.config import Source
from rollouts_core.data.files import RawRow, raw_rows
from rollouts_core.data.messages import Data, message_from_data, messages_problem, tools_from_data, tools_problem
from rollouts_core.errors import BadInput
from rollouts_core.store.identity import External
from rollouts_core.types import Message

PLAIN = ("prompt", "completion", "text")
MAX_PROBLEMS = 20


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
    """Of plain text, what is given and what follows, which is learnt."""
    tools: tuple[Data, ...] = ()
    """What the assistant may call, as templates read it."""


@dataclass(frozen=True)
class FaultyRow:
    place: str
    problem: str

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}"


@dataclass(frozen=True)
class RowShard:
    number: int
    count: int
    """Of all its rows, good or not."""
    rows: tuple[Row, ...]
    problems: tuple[str, ...]


def load_rows(source: Source, external: External) -> list[Row]:
    """All rows of a source. Raises `BadInput` listing up to 20 faulty rows, or saying that there are none."""
    rows: list[Row] = []
    problems: list[str] = []
    for row in read_rows(source, external):
        if isinstance(row, Row):
            rows.append(row)
            continue
        problems.append(str(row))
        if len(problems) == MAX_PROBLEMS:
            problems.append("further rows were not read")
            break
    if problems:
        raise BadInput(problems, "data")
    if not rows:
        raise BadInput(f"{external.location or source}: the data set is empty")
    return rows


def read_rows(source: Source, external: External) -> Iterator[Row | FaultyRow]:
    """One after another. Raises `BadInput` as `raw_rows` does."""
    return map(_checked, raw_rows(source, external, lambda index: True))


def row_shards(
    source: Source, external: External, size: int, wanted: Callable[[int], bool] = lambda shard: True
) -> Iterator[RowShard]:
    """Every `size` rows, one shard after another; those that are not wanted without their content.

    Raises `BadInput` as `raw_rows` does.
    """
    raw = raw_rows(source, external, lambda index: wanted(index // size))
    for number, group in groupby(raw, lambda row: row.index // size):
        members = list(group)
        rows = [_checked(row) for row in members] if wanted(number) else []
        good = tuple(row for row in rows if isinstance(row, Row))
        yield RowShard(number, len(members), good, tuple(str(row) for row in rows if isinstance(row, FaultyRow)))


def _checked(raw: RawRow) -> Row | FaultyRow:
    problem = raw.problem or _problem(raw.value)
    return FaultyRow(raw.place, problem) if problem else _row(raw)


def _problem(value: Data) -> str:
    plain = [name for name in PLAIN if value.get(name) is not None]
    if value.get("messages") is None and plain:
        return next((f"{name!r} is no text" for name in plain if not isinstance(value[name], str)), "")
    return messages_problem(value.get("messages")) or tools_problem(value.get("tools"))


def _row(raw: RawRow) -> Row:
    value: Data = raw.value
    if value.get("messages") is None:
        rest = {name: entry for name, entry in value.items() if name not in ("messages", *PLAIN)}
        given, follows = value.get("prompt"), value.get("completion") or value.get("text")
        return Row((), rest, raw.index, raw.place, (given or "", follows or ""))
    rest = {name: entry for name, entry in value.items() if name not in ("messages", "tools")}
    messages = tuple(message_from_data(message) for message in value["messages"])
    return Row(messages, rest, raw.index, raw.place, tools=tools_from_data(value.get("tools")))
