"""Sources, Parquet, batches and the prompt buffer."""

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts_core.config import HubDataset, Jsonl
from rollouts_core.data.batching import batch_indices
from rollouts_core.data.prompt_table import read_prompts
from rollouts_core.data.prompts import DataBuffer
from rollouts_core.data.sources import Row, load_rows
from rollouts_core.data.tokenized import count_rows, examples_in, read_shards, write_table
from rollouts_core.data.tokenizing import tokenize_examples, tokenize_prompts
from rollouts_core.errors import BadInput
from rollouts_core.store.identity import identify_source
from rollouts_core.types import Message, Prompt
from tests.rollouts_core.models import character_tokenizer

GOOD = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}], "answer": "2"}


def rows_of(path: Path, *lines: Any) -> list[Row]:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    source = Jsonl(path=path)
    return load_rows(source, identify_source(source))


def test_rows_keep_their_columns_and_their_place(tmp_path: Path) -> None:
    first, second = rows_of(tmp_path / "d.jsonl", GOOD, "", GOOD | {"level": 3})
    assert first.messages == (Message("user", "1+1="), Message("assistant", "2"))
    assert second.metadata == {"answer": "2", "level": 3}
    assert (second.source_row, second.place) == (1, f"{tmp_path / 'd.jsonl'}:3")


def test_faulty_rows_are_listed_together_with_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        rows_of(
            tmp_path / "d.jsonl",
            GOOD,
            '{"messages": [',
            "[1]",
            {"messages": []},
            {"messages": [{"role": "robot", "content": "x"}]},
            {"messages": [{"role": "user", "content": 3}]},
            '{"text": "half of a smile: \\ud83d"}',
            '{"text": ' + "9" * 5000 + "}",
            "[" * 10**5,
        )
    shape = ["a list, not an object", "no list of messages", "no role among", "no text under"]
    expected = ["not valid JSON", *shape, "half of a character", "not valid JSON", "not valid JSON"]
    for line, (problem, words) in enumerate(zip(caught.value.problems, expected, strict=True), 2):
        assert problem.startswith(f"{tmp_path / 'd.jsonl'}:{line}: ")
        assert words in problem


def test_a_fault_of_many_rows_is_told_once(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        rows_of(tmp_path / "d.jsonl", *['{"other": 1}'] * 1100, "[]")
    nothing = "no list of messages under 'messages', and neither 'prompt' nor 'text'"
    assert caught.value.problems == (
        f"{tmp_path}/d.jsonl:1, 2, 3 and 1,097 more rows: {nothing}",
        f"{tmp_path}/d.jsonl:1101: a list, not an object",
    )


def test_problems_of_many_kinds_are_cut_short(tmp_path: Path) -> None:
    rows = [json.dumps({"messages": [*[{"role": "user", "content": "1"}] * n, {}]}) for n in range(30)]
    with pytest.raises(BadInput) as caught:
        rows_of(tmp_path / "d.jsonl", *rows)
    assert len(caught.value.problems) == 21
    assert caught.value.problems[-1] == "and 10 problems more"


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="the data set is empty"):
        rows_of(tmp_path / "d.jsonl")


def test_anything_that_datasets_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files named relative to where the run begins are found by a job that runs elsewhere; so is a directory."""
    directory = tmp_path / "set"
    directory.mkdir()
    renamed = {"chat": GOOD["messages"], "solution": "2"}
    (directory / "r.jsonl").write_text(json.dumps(renamed) + "\n")
    columns = {"messages_column": "chat", "answer_column": "solution"}
    monkeypatch.chdir(tmp_path)
    sources = [HubDataset(name="json", data_files=("set/r.jsonl",), **columns), HubDataset(name="set", **columns)]
    externals = [identify_source(source) for source in sources]
    monkeypatch.chdir("/")
    for source, external in zip(sources, externals, strict=True):
        (row,) = load_rows(source, external)
        assert row.messages[1] == Message("assistant", "2")
        assert row.metadata == {"answer": "2"}


def test_parquet_round_trip(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "d.jsonl", GOOD, GOOD)
    tokenizer = character_tokenizer()
    write_table(tokenize_examples(rows, tokenizer, 20), tmp_path / "e" / "0.parquet")
    write_table(tokenize_prompts(rows, tokenizer, 20), tmp_path / "p" / "0.parquet")
    assert pq.read_schema(tmp_path / "e" / "0.parquet").names == [
        "input_ids", "loss_mask", "length", "full_length", "source_row",
    ]  # fmt: skip
    example = examples_in(read_shards(tmp_path / "e"))[1]
    assert tokenizer.decode(example.tokens[example.loss_mask == 1]) == "2<|end|>"
    prompt = read_prompts(tmp_path / "p")[1]
    assert tokenizer.decode(prompt.tokens) == "<|user|>1+1=<|assistant|>"
    assert (prompt.metadata["answer"], prompt.source_row) == ("2", 1)


@pytest.mark.parametrize(
    ("row", "text", "learnt", "prompt"),
    [
        ({"prompt": "1+1=", "completion": "2"}, "1+1=2<|end|>", "2<|end|>", "1+1="),
        ({"text": "1+1=2"}, "1+1=2<|end|>", "1+1=2<|end|>", None),
        ({"prompt": "1+1=", "answer": "2"}, "1+1=<|end|>", "<|end|>", "1+1="),
    ],
)
def test_plain_text_is_learnt_without_a_template(
    tmp_path: Path, row: dict[str, Any], text: str, learnt: str, prompt: str | None
) -> None:
    rows, tokenizer = rows_of(tmp_path / "d.jsonl", row, GOOD), character_tokenizer()
    write_table(tokenize_examples(rows, tokenizer, 20), tmp_path / "e" / "0.parquet")
    example = examples_in(read_shards(tmp_path / "e"))[0]
    assert tokenizer.decode(example.tokens) == text
    assert tokenizer.decode(example.tokens[example.loss_mask == 1]) == learnt
    if prompt is None:
        with pytest.raises(BadInput, match=r"d\.jsonl:1: has no prompt"):
            tokenize_prompts(rows, tokenizer, 20)
        return
    write_table(tokenize_prompts(rows, tokenizer, 20), tmp_path / "p" / "0.parquet")
    assert tokenizer.decode(read_prompts(tmp_path / "p")[0].tokens) == prompt


def test_an_answer_without_a_prompt_is_named(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "d.jsonl", {"messages": [{"role": "assistant", "content": "2"}]})
    with pytest.raises(BadInput, match=r"d\.jsonl:1: has no prompt"):
        tokenize_prompts(rows, character_tokenizer(), 20)


def test_a_plain_prompt_is_whole_where_the_tokenizer_has_no_end(tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(character_tokenizer())
    tokenizer.eos_token = None
    table = tokenize_prompts(rows_of(tmp_path / "d.jsonl", {"prompt": "1+1=", "answer": "2"}), tokenizer, 20)
    write_table(table, tmp_path / "plain" / "0.parquet")
    (plain,) = read_prompts(tmp_path / "plain")
    assert (plain.messages, plain.text, plain.metadata["answer"]) == ((), "1+1=", "2")
    assert tokenizer.decode(table["input_ids"][0].as_py()) == "1+1="


def test_plain_text_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="'completion' is not text"):
        rows_of(tmp_path / "d.jsonl", {"prompt": "1", "completion": 2})


@pytest.mark.parametrize(
    ("overlong", "texts"),
    [
        ("drop", ["1=2<|end|>"]),
        ("cut_right", ["123456", "1=2<|end|>"]),
        ("cut_left", ["67=89<|end|>", "1=2<|end|>"]),
    ],
)
def test_what_is_too_long_is_dropped_or_cut_and_counted(tmp_path: Path, overlong: Any, texts: list[str]) -> None:
    long, fits = {"prompt": "12", "completion": "34567=89"}, {"prompt": "1=", "completion": "2"}
    asked = {"prompt": "1" * 9, "completion": "2"}
    rows, tokenizer = rows_of(tmp_path / "d.jsonl", long, fits, asked), character_tokenizer()
    write_table(tokenize_examples(rows[:2], tokenizer, 6, overlong), tmp_path / "e" / "0.parquet")
    assert [tokenizer.decode(example.tokens) for example in examples_in(read_shards(tmp_path / "e"))] == texts
    counts = count_rows(tmp_path / "e")
    assert (counts["rows"], counts["cut"]) == (len(texts), len(texts) - 1)
    assert len(tokenize_prompts(rows, tokenizer, 6, overlong)) == 2
    assert len(tokenize_examples(rows[2:], tokenizer, 6, "cut_right")) == 0


def test_rows_that_cannot_be_learnt_from_are_named(tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "1" * 30}, {"role": "assistant", "content": "2"}]}
    unknown = {"messages": [{"role": "user", "content": "é"}, {"role": "assistant", "content": "2"}]}
    silent = {"messages": [{"role": "user", "content": "1"}]}
    rows = rows_of(tmp_path / "d.jsonl", GOOD, long, unknown, silent)
    with pytest.raises(BadInput) as caught:
        tokenize_examples(rows, character_tokenizer(), 20)
    assert [problem.split(": ", 1)[0].rsplit(":", 1)[1] for problem in caught.value.problems] == ["2", "3", "4"]
    for words in ("34 tokens, longer than the 20", "does not know", "no turn of the assistant"):
        assert words in str(caught.value)


@settings(max_examples=50)
@given(st.integers(1, 300), st.integers(1, 20), st.integers(0, 5), st.integers(0, 3))
def test_an_epoch_holds_every_example_once(count: int, batch_size: int, seed: int, epoch: int) -> None:
    steps = range(epoch * -(-count // batch_size), (epoch + 1) * -(-count // batch_size))
    batches = [batch_indices([count], batch_size, seed, step) for step in steps]
    assert sorted(index for batch in batches for index in batch) == list(range(count))
    assert max(map(len, batches)) <= batch_size


def test_batches_are_a_function_of_the_step() -> None:
    steps = [batch_indices([40], 8, 0, step) for step in range(10)]
    assert steps == [batch_indices([40], 8, 0, step) for step in reversed(range(10))][::-1]
    assert sorted(index for batch in steps[:5] for index in batch) == list(range(40))
    assert steps[:5] != steps[5:]
    assert steps[:5] != [batch_indices([40], 8, 1, step) for step in range(5)]


def test_the_last_batch_of_an_epoch_has_what_is_left() -> None:
    steps = [batch_indices([10], 4, 0, step) for step in range(3)]
    assert [len(step) for step in steps] == [4, 4, 2]
    assert sorted(index for batch in steps for index in batch) == list(range(10))


@given(st.integers(1, 20), st.lists(st.integers(1, 15), max_size=12), st.integers(0, 3))
def test_the_buffer_gives_the_same_prompts_however_they_are_taken(count: int, takes: list[int], seed: int) -> None:
    prompts = [Prompt((), (index,), {}, index) for index in range(count)]
    buffer = DataBuffer(prompts, seed)
    piecewise: list[Prompt] = []
    for take in takes:
        taken, buffer = buffer.get_prompts(take)
        piecewise += taken
        buffer = DataBuffer(prompts, seed, **buffer.position())
    at_once, _ = DataBuffer(prompts, seed).get_prompts(sum(takes))
    assert piecewise == at_once
    for epoch in range(len(piecewise) // count):
        assert {prompt.source_row for prompt in piecewise[epoch * count : (epoch + 1) * count]} == set(range(count))
