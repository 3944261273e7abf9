"""Prompts in their files: the same as if all were held, and held only in part."""

import json
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from rollouts_core.data import prompt_table
from rollouts_core.data.prompt_table import PromptTable, read_prompts
from rollouts_core.data.prompts import DataBuffer, of_rows
from rollouts_core.data.tokenized import GROUP_ROWS, PROMPTS, write_table
from rollouts_core.types import Message, Prompt

SHARD = 2 * GROUP_ROWS + 100


def prompt(row: int) -> Prompt:
    tokens = tuple(range(row % 7, row % 7 + 3 + row % 5))
    return Prompt((Message("user", f"question {row}"),), tokens, {"answer": str(row)}, row)


def write(directory: Path, rows: list[int]) -> list[Prompt]:
    """In shards, as tokenization does."""
    for number, first in enumerate(range(0, len(rows), SHARD)):
        made = [prompt(row) for row in rows[first : first + SHARD]]
        columns = {
            "input_ids": [list(one.tokens) for one in made],
            "length": [len(one.tokens) for one in made],
            "source_row": [one.source_row for one in made],
            "messages": [json.dumps([{"role": "user", "content": one.messages[0].content}]) for one in made],
            "metadata": [json.dumps(dict(one.metadata)) for one in made],
        }
        write_table(pa.table(columns, PROMPTS), directory / f"{number:05d}.parquet")
    return [prompt(row) for row in rows]


def test_it_is_the_list_of_the_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_table, "CACHE_BYTES", 10_000)
    expected = write(tmp_path, list(range(0, 6 * SHARD, 2)))
    table = read_prompts(tmp_path)
    assert list(table) == expected
    assert (table[-1], table[5:7], len(table)) == (expected[-1], expected[5:7], len(expected))
    assert table.longest == max(len(one.tokens) for one in expected)
    assert table.largest_token() == max(max(one.tokens) for one in expected)
    assert of_rows(table, {4, 2 * SHARD, 5}) == of_rows(expected, {4, 2 * SHARD, 5})
    with pytest.raises(IndexError):
        table[len(expected)]


def test_rows_of_a_mixture_are_counted_on(tmp_path: Path) -> None:
    first, second = write(tmp_path / "0", [0, 3, 4]), write(tmp_path / "1", [1, 2])
    table = PromptTable([tmp_path / "0", tmp_path / "1"])
    assert table.sizes == (3, 2)
    assert [one.source_row for one in table] == [0, 3, 4, 6, 7]
    assert [one.tokens for one in table] == [one.tokens for one in first + second]
    assert table.of_rows({6})[6].metadata == {"answer": "1"}


def test_it_is_read_by_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_table, "CACHE_BYTES", 10_000)
    expected = write(tmp_path, list(range(3_000)))
    table = read_prompts(tmp_path)
    places = [(place * 977) % 3_000 for place in range(2_000)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(table.__getitem__, places)) == [expected[place] for place in places]


def test_few_of_many_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch of draws in random order holds the numbers, and the groups that were read last."""
    monkeypatch.setattr(prompt_table, "CACHE_BYTES", 2**20)
    count = 40_000
    write(tmp_path, list(range(count)))
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    buffer = DataBuffer(read_prompts(tmp_path), 0)
    for _ in range(30):
        _, buffer = buffer.get_prompts(8)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 40 * count
    assert pa.total_allocated_bytes() - before < 2 * 2**20
