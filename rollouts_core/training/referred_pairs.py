"""Preferences with the reference's log-probabilities, in a file, since these are as many as the preferences' tokens.

Decision: the reference scores some hundred pairs at a time, and its log-probabilities are appended to the file, in
float32, as they were computed. So memory does not grow with the data. The file gets its name when all of them are in
it.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload
from weakref import finalize

import numpy as np

from rollouts_core.data.tokenized import Floats, Pair
from rollouts_core.training.backend import TrainingBackend
from rollouts_core.training.collate import learnt_tokens
from rollouts_core.training.dpo import reference_logprobs, with_reference

TOGETHER = 512
"""Pairs that the reference scores at once."""
KIND = np.dtype(np.float32)


class ReferredPairs(Sequence[Pair]):
    """Pairs with their reference's log-probabilities. Only those that training will see have them."""

    def __init__(self, pairs: Sequence[Pair], used: Sequence[int], file: Path) -> None:
        """`used`: ascending; `file`: as `keep_reference` wrote it for them."""
        self._pairs = pairs
        self._place = {index: place for place, index in enumerate(used)}
        counts = [learnt_tokens([answer]) for index in used for answer in pairs[index]]
        self._ends = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._file = os.open(file, os.O_RDONLY)
        finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return len(self._pairs)

    @overload
    def __getitem__(self, index: int) -> Pair: ...

    @overload
    def __getitem__(self, index: slice) -> list[Pair]: ...

    def __getitem__(self, index: int | slice) -> Pair | list[Pair]:
        if isinstance(index, slice):
            return [self[at] for at in range(len(self))[index]]
        answer = 2 * self._place[index]
        logprobs = [self._read(answer), self._read(answer + 1)]
        return with_reference([self._pairs[index]], logprobs)[0]

    def _read(self, answer: int) -> Floats:
        begin, end = (int(place) * KIND.itemsize for place in self._ends[answer : answer + 2])
        return np.frombuffer(os.pread(self._file, end - begin, begin), KIND).astype(np.float64)


def keep_reference(
    backend: TrainingBackend, pairs: Sequence[Pair], used: Sequence[int], tokens_per_pass: int, file: Path
) -> None:
    """Write what the backend, untrained yet, says of the pairs that are used; nothing where the file is there."""
    if file.exists():
        return
    print(f"the reference scores {len(used):,} preferences", flush=True)
    unfinished = file.with_suffix(".unfinished")
    with unfinished.open("wb") as opened:
        for logprobs in _scored(backend, pairs, used, tokens_per_pass):
            opened.write(logprobs.astype(KIND).tobytes())
    unfinished.rename(file)


def _scored(
    backend: TrainingBackend, pairs: Sequence[Pair], used: Sequence[int], tokens_per_pass: int
) -> Iterator[Floats]:
    for begin in range(0, len(used), TOGETHER):
        yield from reference_logprobs(backend, [pairs[at] for at in used[begin : begin + TOGETHER]], tokens_per_pass)
