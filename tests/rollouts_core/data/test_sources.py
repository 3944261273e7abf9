"""Rows from every kind of file, conversations with tools among them, and what is said of faulty ones."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollouts_core.config import Arrow, HubDataset, Jsonl, Parquet, Source
from rollouts_core.data.chat import tokenize_conversation
from rollouts_core.data.messages import messages_from_json, messages_to_json
from rollouts_core.data.sources import Row, load_rows, row_shards
from rollouts_core.data.tokenized import examples_in, read_shards, write_table
from rollouts_core.data.tokenizing import tokenize_examples
from rollouts_core.errors import BadInput
from rollouts_core.store.identity import identify_source
from rollouts_core.types import Message, ToolCall
from tests.rollouts_core.models import character_tokenizer

CHAT = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}], "answer": "2"}
TOOL = {"name": "add", "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "number"}}}}
CALLING = {
    "messages": [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "add", "arguments": '{"x": 1}'}}]},
        {"role": "tool", "content": "2", "name": "add", "tool_call_id": "c1"},
        {"role": "assistant", "content": [{"type": "text", "text": "2"}], "thinking": "easy"},
    ],
    "tools": [{"type": "function", "function": TOOL}],
}
SPOKEN = (
    Message("user", "1+1="),
    Message("assistant", "", (ToolCall("add", {"x": 1}, "c1"),)),
    Message("tool", "2", name="add", tool_call_id="c1"),
    Message("assistant", "2", reasoning="easy"),
)


def written(kind: str, rows: list[dict[str, Any]], directory: Path) -> Source:
    path = directory / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Jsonl(path=path)
    columns = sorted({name for row in rows for name in row})
    table = pa.Table.from_pylist([dict.fromkeys(columns) | row for row in rows])
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=2)
        return Parquet(path=path)
    make = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
    with make(str(path), table.schema) as sink:
        sink.write_table(table, max_chunksize=2)
    return Arrow(path=path)


def text_of(turn: dict[str, Any]) -> str:
    content = turn.get("content", "")
    return content if isinstance(content, str) else content[0]["text"]


def rows_of(source: Source) -> list[Row]:
    return load_rows(source, identify_source(source))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "stream"])
def test_every_kind_of_file_gives_the_same_rows(kind: str, tmp_path: Path) -> None:
    plain = {"prompt": "1+1=", "completion": "2"}
    calling = CALLING | {"tools": json.dumps([TOOL])}
    if kind != "jsonl":  # a column has one type
        calling |= {"messages": [turn | {"content": text_of(turn)} for turn in CALLING["messages"]]}
    first, second, third = rows_of(written(kind, [CHAT, calling, plain], tmp_path))
    assert (first.messages, first.metadata["answer"]) == ((Message("user", "1+1="), Message("assistant", "2")), "2")
    assert second.messages == SPOKEN
    assert second.tools[0]["function"]["parameters"]["properties"] == {"x": {"type": "number"}}
    assert (third.messages, third.plain, third.source_row) == ((), ("1+1=", "2"), 2)
    line = f"{tmp_path}/rows.{kind}:3" if kind == "jsonl" else f"{tmp_path}/rows.{kind} row 2"
    assert third.place == line


@pytest.mark.parametrize("streaming", [False, True])
def test_what_datasets_saved_and_what_it_streams(streaming: bool, tmp_path: Path) -> None:
    datasets.Dataset.from_list([CHAT, CHAT]).save_to_disk(str(tmp_path / "saved"))
    (file,) = (tmp_path / "saved").glob("*.arrow")
    written("jsonl", [CHAT, CHAT], tmp_path)
    hub = HubDataset(name="json", data_files=(str(tmp_path / "rows.jsonl"),), streaming=streaming)
    for source in (Arrow(path=file), hub):
        assert [row.messages[1].content for row in rows_of(source)] == ["2", "2"]


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    written("jsonl", [CHAT], tmp_path)
    for source in (Parquet(path=tmp_path / "rows.jsonl"), Arrow(path=tmp_path / "rows.jsonl")):
        with pytest.raises(BadInput, match=rf"rows\.jsonl: not a readable {source.kind} file"):
            rows_of(source)


def test_a_pinned_columnar_file_behind_a_url_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    written("parquet", [CHAT], tmp_path)
    fsspec.filesystem("memory").pipe("/rows.parquet", (tmp_path / "rows.parquet").read_bytes())
    source = Parquet(path="memory://rows.parquet", sha256="0" * 64)
    with pytest.raises(BadInput, match="has the sha256"):
        rows_of(source)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tools": "no json"}, "'tools' is not a list"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\] has no name"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"name": "add"}]}]}, "its role is user"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, r"tool_calls\[0\] without a name"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "add", "arguments": "3"}]}]},
            "arguments are no JSON object",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"messages\[0\] has no text"),
        ({"messages": [{"role": "user", "content": "x", "name": 3}]}, "'name' that is not text"),
    ],
)
def test_faulty_conversations_are_named(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=rf"rows\.jsonl:1: .*{problem}"):
        rows_of(written("jsonl", [CALLING | change], tmp_path))


def test_messages_survive_json() -> None:
    assert messages_from_json(messages_to_json(SPOKEN)) == SPOKEN


def test_shards_are_parsed_only_where_they_are_wanted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps(CHAT)] * 3 + ["{"] * 3 + [json.dumps(CHAT)]))
    source = Jsonl(path=path)
    shards = list(row_shards(source, identify_source(source), 3, lambda shard: shard != 1))
    assert [(shard.number, shard.count, len(shard.rows)) for shard in shards] == [(0, 3, 3), (1, 3, 0), (2, 1, 1)]
    assert not any(shard.faulty for shard in shards)
    assert shards[2].rows[0].source_row == 6


WITHOUT_TOOLS = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
TEMPLATE = (
    "{% for t in tools or [] %}<|system|>{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    ("roles", "learnt"),
    [
        (("assistant",), ["(add)<|end|>", "2<|end|>"]),
        (("tool", "assistant"), ["(add)<|end|>", "2", "2<|end|>"]),
        (("user",), ["1+1="]),
    ],
)
def test_the_roles_that_are_learnt(roles: tuple[str, ...], learnt: list[str], tmp_path: Path) -> None:
    """Headings are never learnt: the model is given them."""
    tokenizer = calling_tokenizer()
    (tokens,) = tokenize_conversation(tokenizer, SPOKEN, ({"type": "function", "function": TOOL},), roles)
    marks = [(token, learns) for token, learns in zip(tokens.ids.tolist(), tokens.mask.tolist(), strict=True)]
    runs = "".join(tokenizer.decode([token]) if learns else " " for token, learns in marks).split()
    assert runs == learnt


def test_tools_and_calls_are_rendered_and_a_template_without_them_is_refused(tmp_path: Path) -> None:
    rows = rows_of(written("jsonl", [CALLING], tmp_path))
    write_table(tokenize_examples(rows, calling_tokenizer(), 60), tmp_path / "e" / "0.parquet")
    (example,) = examples_in(read_shards(tmp_path / "e"))
    assert calling_tokenizer().decode(example.tokens) == (
        "<|system|>add<|user|>1+1=<|assistant|>(add)<|end|><|tool|>2<|assistant|>2<|end|>"
    )
    with pytest.raises(BadInput, match=r"rows\.jsonl:1: the chat template leaves out the tool add"):
        tokenize_examples(rows, calling_tokenizer(WITHOUT_TOOLS), 60)


def calling_tokenizer(template: str = TEMPLATE) -> Any:
    made = character_tokenizer("0123456789+=()ad")
    made.chat_template = template
    return made
