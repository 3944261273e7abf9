"""Rows from JSONL files and from whatever `datasets` loads, checked one by one.

A row is a conversation, `messages`, a list of objects with a known `role` and a text `content`; or plain text, `prompt`
and `completion`, or `prompt` alone, or `text`. Which it is, is seen row by row. Further columns become metadata, which
rewards read. Problems name the file and the line, and are reported together.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

from rollouts_core.config import HubDataset, Jsonl
from rollouts_core.errors import BadInput
from rollouts_core.store.identity import External, is_url
from rollouts_core.types import Message

ROLES = ("system", "user", "assistant", "tool")
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


def load_rows(source: Jsonl | HubDataset, external: External) -> list[Row]:
    """All rows of a source. Raises `BadInput` listing up to 20 faulty rows, or saying that there are none."""
    rows, problems = [], []
    raw = _jsonl(external) if isinstance(source, Jsonl) else _dataset(source, external)
    for index, (place, value) in enumerate(raw):
        if isinstance(value, str):
            problems.append(f"{place}: {value}")
        elif problem := _problem(value):
            problems.append(f"{place}: {problem}")
        else:
            rows.append(_row(value, index, place))
        if len(problems) == MAX_PROBLEMS:
            problems.append("further rows were not read")
            break
    if problems:
        raise BadInput(problems, "data")
    if not rows:
        raise BadInput(f"{external.location or source}: the data set is empty")
    return rows


def _jsonl(external: External) -> Iterator[tuple[str, Any]]:
    """Place and parsed row, or place and what is wrong as text. Blank lines are passed over.

    Raises `BadInput` at the end when the content is not what it is pinned to.
    """
    place, digest = external.location, hashlib.sha256()
    with _open(place) as lines:
        for number, line in enumerate(lines, 1):
            digest.update(line)
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                value = f"not valid JSON: {error}"
            else:
                value = value if isinstance(value, dict) else f"a {type(value).__name__}, not an object"
            yield f"{place}:{number}", value
    if digest.hexdigest() != external.identity.get("sha256", digest.hexdigest()):
        raise BadInput(f"{place} has the sha256 {digest.hexdigest()}, not {external.identity['sha256']}")


def _open(place: str) -> IO[bytes]:
    if not is_url(place):
        return open(place, "rb")
    import fsspec

    opened: IO[bytes] = fsspec.open(place, "rb").open()
    return opened


def _dataset(source: HubDataset, external: External) -> Iterator[tuple[str, Any]]:
    import datasets

    files = external.location.split(os.pathsep) if source.data_files else None
    name = source.name if source.data_files else external.location
    revision = external.identity.get("commit")
    try:
        loaded = datasets.load_dataset(name, source.config, split=source.split, revision=revision, data_files=files)
    except Exception as error:
        raise BadInput(f"data set {source.name}: {type(error).__name__}: {error}") from error
    renamed = {source.messages_column: "messages", source.answer_column: "answer"}
    for index, value in enumerate(loaded):
        yield f"{source.name}[{source.split}] row {index}", {renamed.get(k, k): v for k, v in value.items()}


def _problem(value: Mapping[str, Any]) -> str:
    plain = [name for name in PLAIN if name in value]
    if "messages" not in value and plain:
        return next((f"{name!r} is no text" for name in plain if not isinstance(value[name], str)), "")
    messages = value.get("messages")
    if not isinstance(messages, list) or not messages:
        return "no list of messages under 'messages', and neither 'prompt' nor 'text'"
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            return f"messages[{number}] has no role among {', '.join(ROLES)}"
        if not isinstance(message.get("content"), str):
            return f"messages[{number}] has no text under 'content'"
    return ""


def _row(value: Mapping[str, Any], index: int, place: str) -> Row:
    rest = {name: entry for name, entry in value.items() if name not in ("messages", *PLAIN)}
    if "messages" not in value:
        return Row((), rest, index, place, (value.get("prompt", ""), value.get("completion", value.get("text", ""))))
    rest |= {name: value[name] for name in PLAIN if name in value}
    return Row(tuple(Message(turn["role"], turn["content"]) for turn in value["messages"]), rest, index, place)
