"""Tokenized data as Parquet: demonstrations (ids, loss mask, length, length before it was cut, source row), preferences
(ids and loss mask of both answers) and prompts.

Rows keep their source row, so that whatever is trained on can be traced to a line of a file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

Ids = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.float64]

EXAMPLES = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("length", pa.int32()),
        ("full_length", pa.int32()),
        ("source_row", pa.int32()),
    ]
)
PREFERENCES = pa.schema(
    [
        ("chosen_ids", pa.list_(pa.int32())),
        ("chosen_mask", pa.list_(pa.int8())),
        ("rejected_ids", pa.list_(pa.int32())),
        ("rejected_mask", pa.list_(pa.int8())),
        ("length", pa.int32()),
        ("source_row", pa.int32()),
    ]
)
GROUP_ROWS = 500
"""Read together, where rows are read when they are asked for."""
PROMPTS = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("length", pa.int32()),
        ("source_row", pa.int32()),
        ("messages", pa.string()),
        ("metadata", pa.string()),
    ]
)


@dataclass(frozen=True)
class Example:
    """A sequence to train on; `loss_mask` is 1 for tokens that the model learns to generate."""

    tokens: Ids
    loss_mask: Ids
    shared: int = 0
    """The number of first tokens that other examples of the batch may share."""
    streams: Mapping[str, Floats] = field(default_factory=dict)
    """Numbers for each learnt token, by the names of `TrainBatch`'s fields without their legend."""
    experts: npt.NDArray[np.uint8] | None = None
    """The experts that each token is to use, a row for each token (`inference.told_experts`)."""


Pair = tuple[Example, Example]
"""The chosen answer and the rejected one, each behind the prompt."""


def write_table(table: pa.Table, path: Path) -> None:
    """Write a Parquet file under another name, then rename it: a reader never sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    pq.write_table(table, unfinished, compression="zstd", row_group_size=GROUP_ROWS)
    unfinished.rename(path)


def read_shards(directory: Path, columns: list[str] | None = None) -> pa.Table:
    """All shards of a directory as one table, in their order."""
    return pa.concat_tables([pq.read_table(path, columns=columns) for path in sorted(directory.glob("*.parquet"))])


def count_rows(directory: Path) -> dict[str, float]:
    """Rows, tokens, rows of the source, and of demonstrations how many were cut."""
    table = read_shards(directory)
    lengths = np.asarray(table["length"])
    counts = {"rows": float(len(lengths)), "tokens": float(lengths.sum())}
    counts["source_rows"] = float(len(np.unique(np.asarray(table["source_row"]))))
    if "full_length" in table.column_names:
        counts["cut"] = float((np.asarray(table["full_length"]) > lengths).sum())
    return counts


def examples_in(table: pa.Table) -> list[Example]:
    """Their arrays are views of the table's."""
    columns = (_lists(table[name]) for name in ("input_ids", "loss_mask"))
    return [Example(ids, mask) for ids, mask in zip(*columns, strict=True)]


def preferences_in(table: pa.Table) -> list[Pair]:
    """Their arrays are views of the table's."""
    columns = [_lists(table[name]) for name in PREFERENCES.names[:4]]
    return [
        to_pair(Example(ids, mask), Example(other_ids, other_mask))
        for ids, mask, other_ids, other_mask in zip(*columns, strict=True)
    ]


def to_pair(chosen: Example, rejected: Example) -> Pair:
    """`shared` counts the first tokens that they have in common and that neither learns."""
    given = min(int(chosen.loss_mask.argmax()), int(rejected.loss_mask.argmax()))
    differ = np.flatnonzero(chosen.tokens[:given] != rejected.tokens[:given])
    shared = int(differ[0]) if len(differ) else given
    return replace(chosen, shared=shared), replace(rejected, shared=shared)


def directories_of(data: Path, role: str) -> list[Path]:
    """The directories of a role's source, or of each source of its mixture."""
    mixed = sorted(data.glob(f"{role}-*"), key=lambda path: int(path.name.removeprefix(f"{role}-")))
    return mixed or [data / role]


def _lists(column: pa.ChunkedArray) -> Iterator[Ids]:
    for chunk in column.chunks:
        values, offsets = np.asarray(chunk.values), np.asarray(chunk.offsets)
        yield from (values[start:end] for start, end in pairwise(offsets))
