"""The rollout viewer's files, and what they tell of tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts_core.config.model import TokenizerSpec
from rollouts_core.data.token_text import token_pieces
from rollouts_core.data.tokenizers import train_tokenizer
from rollouts_core.observe.viewer import CHUNK, write_viewer
from rollouts_core.rollout.records import sample_record
from rollouts_core.types import Message, Prompt, Sample, Status


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(TokenizerSpec(kind="byte_bpe", vocab_size=300), ["hello world", "äöü 你好 🙂"] * 20, 64)


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet="helo wrdäö你好🙂\n", max_size=40))
def test_pieces_join_to_the_text(tokenizer: Any, text: str) -> None:
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = token_pieces(tokenizer, tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=False)


def test_a_character_of_several_tokens_stands_with_its_last(tokenizer: Any) -> None:
    tokens = tokenizer("🙃", add_special_tokens=False)["input_ids"]
    assert len(tokens) > 1
    assert token_pieces(tokenizer, tokens) == [""] * (len(tokens) - 1) + ["🙃"]


def test_a_cut_off_character_is_still_shown(tokenizer: Any) -> None:
    tokens = tokenizer("🙃", add_special_tokens=False)["input_ids"][:-1]
    assert "".join(token_pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_a_record_tells_each_token_and_the_conversation(tokenizer: Any) -> None:
    tokens = tuple(tokenizer("hello world", add_special_tokens=False)["input_ids"])
    learnt = len(tokens) - 1
    sample = Sample(
        prompt=Prompt((Message("user", "hello"),), tokens[:1], {"answer": "world"}, 7),
        response="world",
        tokens=tokens,
        loss_mask=(0, *[1] * learnt),
        rollout_log_probs=(-0.5,) * learnt,
        weight_versions=(3,) * learnt,
        group_index=2,
        status=Status.COMPLETED,
        reward=1.0,
        episode=1,
    )
    record = sample_record(sample, [0.25] * learnt, tokenizer)
    assert (record["group"], record["sample"], record["stop"], record["answer"]) == (2, 1, None, "world")
    assert "".join(record["pieces"]) == "hello world"
    assert record["advantages"] == [0.25] * learnt
    assert [message["role"] for message in record["messages"]] == ["user", "assistant"]


def rollout(number: int) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    return {
        "step": 1 + number // 8, "group": number // 4 % 2, "sample": number % 4, "reward": float(number % 2),
        "status": "completed", "stop": None, "loss_mask": [0, 1, 1], "advantages": [0.5, -1.5],
        "prompt": "p" * 500, "response": "</script>\u2028", "messages": [{"role": "assistant", "tool_calls": [call]}],
    }  # fmt: skip


def test_the_index_has_a_row_for_each_rollout_and_chunks_hold_them(tmp_path: Path) -> None:
    count = 2 * CHUNK + 1
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(rollout(i)) + "\n" for i in range(count)))
    page = write_viewer(tmp_path, "a-run")
    assert page == tmp_path / "viewer" / "index.html"
    index = json.loads((page.parent / "data" / "index.js").read_text().removeprefix("const INDEX = ").rstrip(";\n"))
    assert {len(column) for name, column in index.items() if name not in ("run", "chunk")} == {count}
    assert (index["run"], index["step"][8], index["calls"][0], index["advantage"][0]) == ("a-run", 2, 1, -0.5)
    assert (index["stop"][0], index["learnt"][0], len(index["prompt"][0])) == ("completed", 2, 160)
    chunks = sorted(path.name for path in (page.parent / "data").glob("chunk-*.js"))
    assert chunks == ["chunk-00000.js", "chunk-00001.js", "chunk-00002.js"]
    last = (page.parent / "data" / chunks[-1]).read_text()
    assert json.loads(last.removeprefix("arrived(2, ").rstrip(");\n"))[0]["step"] == 1 + (count - 1) // 8


def test_a_run_without_rollouts_has_no_viewer(tmp_path: Path) -> None:
    assert write_viewer(tmp_path, "a-run") is None
    (tmp_path / "rollouts.jsonl").write_text("")
    assert write_viewer(tmp_path, "a-run") is None
