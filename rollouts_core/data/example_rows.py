"""Demonstrations and preferences as a training reads them: any row at any time, whatever memory there is.

Decision: Parquet is read by groups of rows, and training asks for rows in random order. So large data are written once
more, one row after another, into the stage's partial work, and each row is read from there. Eight bytes a row stay in
memory. Rows are read, not mapped: pages of a mapped file would count as the process's memory.
"""

import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import overload
from weakref import finalize

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from pyarrow.compute import list_value_length

from rollouts_core.data.tokenized import GROUP_ROWS, Example, Ids, Pair, to_pair

HELD_BYTES = 64 * 2**20
"""Smaller data stay in memory."""
DEMONSTRATIONS = ("input_ids", "loss_mask")
CHOSEN, REJECTED = ("chosen_ids", "chosen_mask"), ("rejected_ids", "rejected_mask")
KINDS = (np.int32, np.int8)
"""Types of token ids and masks."""


class ExampleRows(Sequence[Example]):
    """The demonstrations of one directory of shards, or of several one after another."""

    def __init__(
        self,
        directories: Sequence[Path],
        scratch: Path,
        held_bytes: int = HELD_BYTES,
        columns: tuple[str, str] = DEMONSTRATIONS,
    ) -> None:
        """`scratch`: a directory for files of the rows, which are taken up again where they are there; `columns`: of
        token ids and masks."""
        self._columns = dict(zip(columns, KINDS, strict=True))
        lengths = [[_lengths(path, columns[0]) for path in _shards(directory)] for directory in directories]
        self.sizes = tuple(sum(map(len, of)) for of in lengths)
        """Rows of each directory."""
        self._ends = np.concatenate([np.empty(0, np.int64), *chain(*lengths)]).astype(np.int64).cumsum()
        self._shards = [path for directory in directories for path in _shards(directory)]
        total = int(self._ends[-1]) if len(self._ends) else 0
        self._held: dict[str, Ids] = {}
        self._files: dict[str, int] = {}
        if total * sum(np.dtype(kind).itemsize for kind in KINDS) <= held_bytes:
            self._held = {
                name: np.concatenate([np.empty(0, kind), *self._values(name)]) for name, kind in self._columns.items()
            }
        else:
            self._files = {name: self._opened(name, scratch / f"rows.{name}") for name in columns}

    def largest_token(self) -> int:
        """Reads all of them."""
        ids = next(iter(self._columns))
        return max((int(values.max(initial=-1)) for values in self._values(ids)), default=-1)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, place: int) -> Example: ...

    @overload
    def __getitem__(self, place: slice) -> list[Example]: ...

    def __getitem__(self, place: int | slice) -> Example | list[Example]:
        if isinstance(place, slice):
            return [self[at] for at in range(len(self))[place]]
        place = range(len(self))[place]
        begin, end = int(self._ends[place - 1]) if place else 0, int(self._ends[place])
        tokens, mask = (self._read(name, begin, end) for name in self._columns)
        return Example(tokens, mask)

    def _read(self, name: str, begin: int, end: int) -> Ids:
        if name in self._held:
            return self._held[name][begin:end]
        kind = np.dtype(self._columns[name])
        return np.frombuffer(os.pread(self._files[name], (end - begin) * kind.itemsize, begin * kind.itemsize), kind)

    def _values(self, name: str) -> Iterator[Ids]:
        """The values of all rows, one behind the other, group by group."""
        for path in self._shards:
            for batch in pq.ParquetFile(path).iter_batches(GROUP_ROWS, columns=[name]):
                yield np.asarray(batch.column(name).flatten(), self._columns[name])

    def _opened(self, name: str, file: Path) -> int:
        if not file.exists():
            unfinished = file.with_name(f"{file.name}.unfinished")
            with unfinished.open("wb") as opened:
                for values in self._values(name):
                    opened.write(values.data)
            unfinished.rename(file)
        opened_file = os.open(file, os.O_RDONLY)
        finalize(self, os.close, opened_file)
        return opened_file


class PreferenceRows(Sequence[Pair]):
    """The same of preferences."""

    def __init__(self, directories: Sequence[Path], scratch: Path, held_bytes: int = HELD_BYTES) -> None:
        self._chosen = ExampleRows(directories, scratch, held_bytes, CHOSEN)
        self._rejected = ExampleRows(directories, scratch, held_bytes, REJECTED)
        self.sizes = self._chosen.sizes

    def largest_token(self) -> int:
        return max(self._chosen.largest_token(), self._rejected.largest_token())

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, place: int) -> Pair: ...

    @overload
    def __getitem__(self, place: slice) -> list[Pair]: ...

    def __getitem__(self, place: int | slice) -> Pair | list[Pair]:
        if isinstance(place, slice):
            return [self[at] for at in range(len(self))[place]]
        return to_pair(self._chosen[place], self._rejected[place])


def _shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.parquet"))


def _lengths(path: Path, ids: str) -> npt.NDArray[np.int32]:
    """The length that stands in a row of preferences is of both answers."""
    file = pq.ParquetFile(path)
    if ids == DEMONSTRATIONS[0]:
        return np.asarray(file.read(columns=["length"])["length"], np.int32)
    batches = file.iter_batches(GROUP_ROWS, columns=[ids])
    lengths = [np.asarray(list_value_length(batch.column(ids)), np.int32) for batch in batches]
    return np.concatenate([np.empty(0, np.int32), *lengths])
