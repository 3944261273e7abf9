"""Prompts as they lie in Parquet files, read when they are asked for.

Decision: memory holds only numbers of each prompt: where it is and how long it is, twelve bytes a row. Prompts are read
by groups of rows, and the latest groups are kept, up to CACHE_BYTES. So large data fit in memory, and small data are
read once.
"""

import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollouts_core.data.messages import messages_from_json
from rollouts_core.types import Prompt

CACHE_BYTES = 64 * 2**20

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _RowGroup:
    """A row group of a Parquet file."""

    path: Path
    number: int
    shift: int
    """Added to the source rows: those of a mixture are counted on from one source to the next."""


def read_prompts(directory: Path) -> "PromptTable":
    return PromptTable([directory])


def prompts_in(table: pa.Table) -> list[Prompt]:
    return [_prompt(row, row["source_row"]) for row in table.to_pylist()]


def _prompt(row: Mapping[str, Any], source_row: int) -> Prompt:
    messages, metadata = messages_from_json(row["messages"]), json.loads(row["metadata"])
    return Prompt(messages, tuple(row["input_ids"]), metadata, source_row)


class PromptTable(Sequence[Prompt]):
    """The prompts of one directory of shards, or of several one after another. Safe to read from several threads."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._groups: list[_RowGroup] = []
        self._ends: list[int] = []
        """For each group, the place behind its last prompt."""
        sizes, lengths, rows = [], [np.empty(0, np.int32)], [np.empty(0, np.int64)]
        for directory in directories:
            shift = int(max((group.max() for group in rows if len(group)), default=-1)) + 1
            before = self._ends[-1] if self._ends else 0
            for path in sorted(directory.glob("*.parquet")):
                file = pq.ParquetFile(path)
                for number in range(file.num_row_groups):
                    self._groups.append(_RowGroup(path, number, shift))
                    self._ends.append(file.metadata.row_group(number).num_rows + (self._ends[-1] if self._ends else 0))
                table = file.read(columns=["length", "source_row"])
                lengths.append(np.asarray(table["length"], np.int32))
                rows.append(np.asarray(table["source_row"], np.int64) + shift)
            sizes.append((self._ends[-1] if self._ends else 0) - before)
        self.sizes = tuple(sizes)
        """Prompts of each directory."""
        self._lengths, self._rows = np.concatenate(lengths), np.concatenate(rows)
        self._read: OrderedDict[_RowGroup, pa.Table] = OrderedDict()
        self._lock = Lock()

    @property
    def longest(self) -> int:
        """Tokens of the longest."""
        return int(self._lengths.max(initial=0))

    def largest_token(self) -> int:
        """Reads all of them."""
        found = -1
        for group in self._groups:
            column = pq.ParquetFile(group.path).read_row_group(group.number, columns=["input_ids"])["input_ids"]
            found = max(found, pc.max(pc.list_flatten(column)).as_py() or 0)
        return found

    def of_rows(self, rows: Collection[int]) -> dict[int, Prompt]:
        """Source row to prompt."""
        places = np.flatnonzero(np.isin(self._rows, list(rows)))
        return {int(self._rows[place]): self[int(place)] for place in places}

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> Prompt: ...

    @overload
    def __getitem__(self, place: slice) -> list[Prompt]: ...

    def __getitem__(self, place: int | slice) -> Prompt | list[Prompt]:
        if isinstance(place, slice):
            return [self[at] for at in range(len(self))[place]]
        place = range(len(self))[place]
        number = bisect_right(self._ends, place)
        table = self._table(self._groups[number])
        (row,) = table.slice(place - (self._ends[number] - len(table)), 1).to_pylist()
        return _prompt(row, int(self._rows[place]))

    def _table(self, group: _RowGroup) -> pa.Table:
        with self._lock:
            if group in self._read:
                self._read.move_to_end(group)
                return self._read[group]
            table = pq.ParquetFile(group.path).read_row_group(group.number)
            self._read[group] = table
            while len(self._read) > 1 and sum(known.nbytes for known in self._read.values()) > CACHE_BYTES:
                self._read.popitem(last=False)
            return table
