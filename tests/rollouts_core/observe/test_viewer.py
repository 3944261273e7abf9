"""The rollout viewer's files, and what they tell of tokens."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts_core.config.model import TokenizerSpec
from rollouts_core.data.token_text import _decoded_again, token_pieces
from rollouts_core.data.tokenizers import train_tokenizer
from rollouts_core.observe.viewer import CHUNK, CHUNK_TOKENS, Viewer, write_viewer
from rollouts_core.rollout.records import sample_record
from rollouts_core.types import Message, Prompt, Sample, Status
from tests.rollouts_core.observe.viewer_files import chunks_of, index_of, rollout


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(TokenizerSpec(kind="byte_bpe", vocab_size=300), ["hello world", "äöü 你好 🙂"] * 20, 64)


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet="helo wrdäö你好🙂\n", max_size=40), st.integers(0, 3), st.integers(0, 3))
def test_pieces_join_to_the_text(tokenizer: Any, text: str, first: int, cut: int) -> None:
    """Also where it begins or ends within a character."""
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = tokens[first : len(tokens) - cut]
    for pieces in (token_pieces(tokenizer, tokens), _decoded_again(tokenizer, tokens)):
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


def write(results: Path, rollouts: Iterable[dict[str, Any]]) -> Path:
    results.mkdir(exist_ok=True)
    (results / "rollouts.jsonl").write_text("".join(json.dumps(rollout) + "\n" for rollout in rollouts))
    page = write_viewer(results, "a-run")
    assert page == results / "viewer" / "index.html"
    return page.parent


def places(count: int) -> list[tuple[int, int, int]]:
    return [(one["step"], one["group"], one["sample"]) for one in map(rollout, range(count))]


def test_the_index_has_a_row_for_each_rollout_and_chunks_hold_them(tmp_path: Path) -> None:
    count = 2 * CHUNK + 1
    viewer = write(tmp_path, map(rollout, range(count)))
    index = index_of(viewer)
    assert {len(index[name]) for name in ("step", "reward", "prompt", "answer", "learnt")} == {count}
    assert (index["run"], index["step"][8], index["calls"][0], index["advantage"][0]) == ("a-run", 2, 1, -0.5)
    assert (index["stop"][0], index["learnt"][0], len(index["prompt"][0])) == ("completed", 2, 160)
    assert index["chunks"] == [0, CHUNK, 2 * CHUNK]
    found = [found for chunk in chunks_of(viewer) for found in chunk]
    assert [(one["step"], one["group"], one["sample"]) for one in found] == places(count)


def test_a_chunk_of_long_answers_has_few(tmp_path: Path) -> None:
    long = {"tokens": [0] * (CHUNK_TOKENS // 3 + 1)}
    viewer = write(tmp_path, ({**rollout(number), **long} for number in range(7)))
    assert index_of(viewer)["chunks"] == [0, 3, 6]
    assert [len(chunk) for chunk in chunks_of(viewer)] == [3, 3, 1]


def test_what_is_added_later_is_written_behind(tmp_path: Path) -> None:
    viewer = Viewer(tmp_path, "a-run")
    assert viewer.write(live=True) is None
    for number in range(CHUNK + 5):
        viewer.add(rollout(number))
        if number in (2, CHUNK - 1, CHUNK):
            page = viewer.write(live=True)
            assert page is not None and len(index_of(page.parent)["step"]) == number + 1
            assert sum(map(len, chunks_of(page.parent))) == number + 1
    page = viewer.write()
    assert page is not None and not index_of(page.parent)["live"]
    found = [found for chunk in chunks_of(page.parent) for found in chunk]
    assert [(one["step"], one["group"], one["sample"]) for one in found] == places(CHUNK + 5)


def test_a_run_without_rollouts_has_no_viewer(tmp_path: Path) -> None:
    assert write_viewer(tmp_path, "a-run") is None
    (tmp_path / "rollouts.jsonl").write_text("")
    assert write_viewer(tmp_path, "a-run") is None
