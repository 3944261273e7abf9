"""Rows as they stand in files: JSONL, Parquet and Arrow from a path or fsspec URL, and whatever `datasets` loads.

Decision: rows are read one after another, never all at once, and only the wanted rows are parsed. So a part of a large
file, or the rest of a stage that was killed, costs little more than its share.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollouts_core.config import Arrow, HubDataset, Jsonl, Parquet, Source
from rollouts_core.data.layouts import NotLaidOutSo, laid_out
from rollouts_core.errors import BadInput
from rollouts_core.store.identity import External, is_url
from rollouts_core.texts import HALF, has_half_characters

Wanted = Callable[[int], bool]
AT_ONCE = 1000


@dataclass(frozen=True)
class RawRow:
    index: int
    """Counted from 0."""
    place: str
    """File and line, for messages to people."""
    value: Any
    """The row's content; None if it is not wanted."""
    problem: str = ""


def raw_rows(source: Source, external: External, wanted: Wanted) -> Iterator[RawRow]:
    """Laid out as ours. Raises `BadInput` when the source cannot be read, or at its end when it is not what it is
    pinned to."""
    match source:
        case Jsonl():
            rows = _jsonl(external, wanted)
        case Parquet() | Arrow():
            rows = _columnar(source, external, wanted)
        case HubDataset():
            rows = _dataset(source, external, wanted)
    return (_laid_out(source, row) for row in rows)


def _laid_out(source: Source, row: RawRow) -> RawRow:
    if row.value is None:
        return row
    try:
        value = _renamed(row.value, source.columns) if source.columns else row.value
        return replace(row, value=laid_out(source.layout, value, source.annotations))
    except MissingColumn as error:
        return replace(row, value=None, problem=str(error))
    except NotLaidOutSo as error:
        return replace(row, value=None, problem=f"no row of the layout {source.layout}: {error}")


class MissingColumn(ValueError):
    """A row lacks a column that the config names."""


def _renamed(value: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """`columns`: our names, then theirs. Raises `MissingColumn`."""
    if missing := [theirs for theirs in columns.values() if theirs not in value]:
        raise MissingColumn(f"has no column {missing[0]!r}; it has {', '.join(map(repr, value))}")
    ours = {theirs: ours for ours, theirs in columns.items()}
    return {ours.get(name, name): entry for name, entry in value.items()}


def _jsonl(external: External, wanted: Wanted) -> Iterator[RawRow]:
    """Blank lines are passed over."""
    place, digest, index = external.location, hashlib.sha256(), -1
    with _open(place) as lines:
        for number, line in enumerate(lines, 1):
            digest.update(line)
            if not line.strip():
                continue
            index += 1
            yield _json_row(index, f"{place}:{number}", line) if wanted(index) else RawRow(index, place, None)
    _refuse_other_than_pinned(external, digest.hexdigest())


def _json_row(index: int, place: str, line: bytes) -> RawRow:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return RawRow(index, place, None, f"not valid JSON: {error}")
    if not isinstance(value, dict):
        return RawRow(index, place, None, f"a {type(value).__name__}, not an object")
    if b"\\ud" in line.lower() and has_half_characters(value):
        return RawRow(index, place, None, HALF)
    return RawRow(index, place, value)


def _columnar(source: Parquet | Arrow, external: External, wanted: Wanted) -> Iterator[RawRow]:
    place, index = external.location, 0
    if is_url(place) and "sha256" in external.identity:
        with _open(place) as content:
            _refuse_other_than_pinned(external, _digest(content))
    with _open(place) as content:
        try:
            for batch in _parquet(content) if isinstance(source, Parquet) else _arrow(content):
                for row in range(batch.num_rows):
                    value = batch.slice(row, 1).to_pylist()[0] if wanted(index) else None
                    yield RawRow(index, f"{place} row {index}", value)
                    index += 1
        except pa.ArrowException as error:
            raise BadInput(f"{place}: not a readable {source.kind} file: {error}") from error


def _parquet(content: IO[bytes]) -> Iterator[pa.RecordBatch]:
    return pq.ParquetFile(content).iter_batches(AT_ONCE)  # type: ignore[no-any-return]


def _arrow(content: IO[bytes]) -> Iterator[pa.RecordBatch]:
    """An IPC file, or a stream, as `datasets` saves."""
    magic = content.read(6)
    content.seek(0)
    if magic != b"ARROW1":
        yield from pa.ipc.open_stream(content)
        return
    opened = pa.ipc.open_file(content)
    for number in range(opened.num_record_batches):
        yield opened.get_batch(number)


def _dataset(source: HubDataset, external: External, wanted: Wanted) -> Iterator[RawRow]:
    import datasets

    files = external.location.split(os.pathsep) if source.data_files else None
    name = source.name if source.data_files else external.location
    revision = external.identity.get("commit")
    renamed = {source.messages_column: "messages", source.answer_column: "answer"}
    try:
        loaded = datasets.load_dataset(
            name, source.config, split=source.split, revision=revision, data_files=files, streaming=source.streaming
        )
        for index, value in enumerate(loaded):
            row = {renamed.get(name, name): entry for name, entry in value.items()} if wanted(index) else None
            yield RawRow(index, f"{source.name}[{source.split}] row {index}", row)
    except Exception as error:
        raise BadInput(f"data set {source.name}: {type(error).__name__}: {error}") from error


def _refuse_other_than_pinned(external: External, sha256: str) -> None:
    pinned = external.identity.get("sha256", sha256)
    if sha256 != pinned:
        raise BadInput(f"{external.location} has the sha256 {sha256}, not {pinned}")


def _digest(content: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while block := content.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _open(place: str) -> IO[bytes]:
    if not is_url(place):
        return open(place, "rb")
    import fsspec

    opened: IO[bytes] = fsspec.open(place, "rb").open()
    return opened
