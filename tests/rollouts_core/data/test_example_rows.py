"""Rows from the file beside a training's partial work against those in memory."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import Table

from rollouts_core.data.example_rows import ExampleRows
from rollouts_core.data.tokenized import EXAMPLES, Example, write_table

ROWS = st.lists(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1, max_size=5), max_size=9)


def written(rows: list[list[tuple[int, bool]]], file: Path) -> Path:
    told = [
        {
            "input_ids": [token for token, _ in row],
            "loss_mask": [int(learnt) for _, learnt in row],
            "length": len(row),
            "full_length": len(row),
            "source_row": number,
        }
        for number, row in enumerate(rows)
    ]
    write_table(Table.from_pylist(told, schema=EXAMPLES), file)
    return file.parent


def same(one: Example, other: Example) -> bool:
    return np.array_equal(one.tokens, other.tokens) and np.array_equal(one.loss_mask, other.loss_mask)


@settings(deadline=None, max_examples=30)
@given(sources=st.lists(st.tuples(ROWS, ROWS), min_size=1, max_size=3))
def test_rows_of_a_file_are_those_in_memory(
    sources: list[tuple[list[list[tuple[int, bool]]], ...]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("rows")
    for number, shards in enumerate(sources):
        for shard, rows in enumerate(shards):
            written(rows, place / str(number) / f"{shard}.parquet")
    directories = [place / str(number) for number in range(len(sources))]
    held, stored = ExampleRows(directories, place), ExampleRows(directories, place, held_bytes=-1)
    again = ExampleRows(directories, place, held_bytes=-1)
    expected = [row for shards in sources for rows in shards for row in rows]
    assert held.sizes == stored.sizes == tuple(sum(map(len, shards)) for shards in sources)
    assert len(held) == len(stored) == len(expected)
    assert held.largest_token() == stored.largest_token() == max((t for row in expected for t, _ in row), default=-1)
    for place_of, row in enumerate(expected):
        assert held[place_of].tokens.tolist() == [token for token, _ in row]
        assert same(held[place_of], stored[place_of])
        assert same(held[place_of], again[place_of])
