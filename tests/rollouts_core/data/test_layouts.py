"""Rows as data sets publish them: recognised, named by a layout, or with columns that are called otherwise."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.config import Jsonl
from rollouts_core.config.schema import identity_of
from rollouts_core.data.layouts import laid_out, recognised
from rollouts_core.data.sources import Row, load_rows
from rollouts_core.data.tokenizing import prompt_of
from rollouts_core.errors import BadInput
from rollouts_core.store.identity import identify_source
from rollouts_core.store.keys import key_of
from rollouts_core.types import Message

GSM8K = {
    "question": "Natalia sold 48 clips in April, and half as many in May. How many?",
    "answer": "In May she sold 48/2 = <<48/2=24>>24 clips.\n#### 72",
}
HH = {
    "chosen": "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: Bye\n\nAssistant: Goodbye.",
    "rejected": "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: Bye\n\nAssistant: What?",
}


def loaded(row: dict[str, Any], directory: Path, **fields: Any) -> Row:
    file = directory / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    source = Jsonl(path=file, **fields)
    (found,) = load_rows(source, identify_source(source))
    return found


def test_gsm8k_is_learnt_from_and_asked(tmp_path: Path) -> None:
    """One file for SFT, RL and evaluation: the worked solution is the assistant's turn, which prompts leave out."""
    row = loaded(GSM8K, tmp_path, layout="gsm8k")
    assert row.messages == (Message("user", GSM8K["question"]), Message("assistant", GSM8K["answer"]))
    assert tuple(prompt_of(row)) == (Message("user", GSM8K["question"]),)
    assert row.metadata["answer"] == "72"
    plain = loaded(GSM8K, tmp_path, layout="gsm8k", annotations=False)
    assert plain.messages[1].content == "In May she sold 48/2 = 24 clips.\n#### 72"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"instruction": "Add.", "input": "1+1", "output": "2"}, [("user", "Add.\n\n1+1"), ("assistant", "2")]),
        ({"instruction": "Say hi.", "input": "", "output": "hi"}, [("user", "Say hi."), ("assistant", "hi")]),
        ({"instruction": "Sum up.", "context": "a", "response": "b"}, [("user", "Sum up.\n\na"), ("assistant", "b")]),
        ({"prompt": "1+1", "response": "2", "system": "Be brief."},
         [("system", "Be brief."), ("user", "1+1"), ("assistant", "2")]),
        ({"question": "1+1", "answer": "2"}, [("user", "1+1"), ("assistant", "2")]),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
         [("user", "q"), ("assistant", "a")]),
    ],
)  # fmt: skip
def test_common_shapes_are_recognised(row: dict[str, Any], said: list[tuple[str, str]], tmp_path: Path) -> None:
    assert [(message.role, message.content) for message in loaded(row, tmp_path).messages] == said


@pytest.mark.parametrize("begins", [True, False])
def test_preferences_as_ultrafeedback_has_them(begins: bool, tmp_path: Path) -> None:
    first = [{"role": "user", "content": "q"}] if begins else []
    answers = {name: [*first, {"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    row = loaded({"prompt": "q", **answers, "score_chosen": 8.0}, tmp_path)
    assert row.messages == (Message("user", "q"), Message("assistant", "chosen"))
    assert row.rejected is not None and row.rejected.messages[-1] == Message("assistant", "rejected")
    assert row.given == 1


def test_preferences_as_hh_has_them(tmp_path: Path) -> None:
    row = loaded(HH, tmp_path, layout="hh")
    assert [message.role for message in row.messages] == ["user", "assistant", "user", "assistant"]
    assert row.messages[-1].content == "Goodbye."
    assert row.given == 3
    with pytest.raises(BadInput, match="no row of the layout hh: its 'chosen' does not begin with"):
        loaded({**HH, "chosen": "Hello"}, tmp_path, layout="hh")


def test_columns_may_be_called_otherwise(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    row = loaded({"dialog": turns, "gold": "a"}, tmp_path, columns={"messages": "dialog", "answer": "gold"})
    assert (row.messages[1].content, row.metadata) == ("a", {"answer": "a"})
    with pytest.raises(BadInput, match=r"rows\.jsonl:1: has no column 'dialog'; it has 'messages'"):
        loaded({"messages": turns}, tmp_path, columns={"messages": "dialog"})


@pytest.mark.parametrize(
    "row", [{"messages": [{"role": "user", "content": "q"}]}, {"prompt": "q", "answer": "a"}, {"text": "t"}]
)
def test_a_row_of_ours_stays_as_it_is(row: dict[str, Any]) -> None:
    assert recognised(row) == row == laid_out("rows", row)


def test_a_field_that_was_added_changes_no_key_at_its_default(tmp_path: Path) -> None:
    source = Jsonl(path=tmp_path / "x")
    assert set(identity_of(source)) == {"kind", "layout"}
    keys = {
        key_of(Jsonl(path=tmp_path / "x", **fields)) for fields in ({}, {"annotations": False}, {"columns": {"a": "b"}})
    }
    assert len(keys) == 3


def test_speakers_that_are_no_text_are_not_taken_for_sharegpts() -> None:
    """Found by `tests.fuzz`: it ended in a TypeError."""
    row = {"conversations": [{"from": ["human"], "value": "a"}]}
    assert recognised(row) == row
