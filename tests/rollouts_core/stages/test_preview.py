"""What would be trained on, seen before it is: lengths, learnt tokens, what is cut, dropped or faulty."""

import json
from pathlib import Path
from typing import Any

from rollouts_core.config.loading import from_data
from rollouts_core.observe.data_page import write_data_page
from rollouts_core.stages.plan import plan
from rollouts_core.stages.preview import SourcePreview, preview
from rollouts_core.store.local import LocalStore


def previewed(config: dict[str, Any], directory: Path, rows: int = 100, examples: int = 2) -> dict[str, SourcePreview]:
    found = preview(plan(from_data(config)).tokenize, LocalStore(directory / "store"), rows, examples)
    return {source.role: source for source in found}


def test_learnt_and_special_tokens_are_told_apart(small_config: dict[str, Any], tmp_path: Path) -> None:
    sources = previewed(small_config, tmp_path)
    assert [*sources] == ["demonstrations", "prompts", "heldout"]
    shown = sources["demonstrations"].examples[0]
    assert "".join(piece.text for piece in shown.pieces if piece.learnt).endswith("<|end|>")
    assert [piece.text for piece in shown.pieces if piece.special] == ["<|user|>", "<|assistant|>", "<|end|>"]
    assert sources["demonstrations"].learnt < sources["demonstrations"].tokens
    assert sources["prompts"].learnt == 0
    for source in sources.values():
        assert sum(count for _, _, count in source.lengths) == source.sequences == source.rows


def test_it_reads_as_many_rows_as_it_is_told_and_says_so(small_config: dict[str, Any], tmp_path: Path) -> None:
    source = previewed(small_config, tmp_path, rows=3, examples=1)["demonstrations"]
    assert (source.rows, source.more, len(source.examples)) == (3, True, 1)


def test_what_is_cut_dropped_or_faulty_is_counted(small_config: dict[str, Any], tmp_path: Path) -> None:
    def row(answer: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": answer}]}

    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps(value) + "\n" for value in (row("2"), row("2" * 90), {"other": 1}, {"other": 2}))
    )
    small_config["data"]["demonstrations"]["path"] = str(path)
    for overlong, expected in {"drop": (1, 1, 0), "cut_right": (2, 0, 1), "refuse": (1, 0, 0)}.items():
        small_config["data"]["overlong"] = overlong
        source = previewed(small_config, tmp_path)["demonstrations"]
        assert (source.sequences, source.dropped, source.cut) == expected, overlong
        assert source.problems[0].startswith(f"{path}:3, 4: no list of messages")
        assert len(source.problems) == (2 if overlong == "refuse" else 1)


def test_preferences_are_shown_with_both_answers(small_config: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "chosen": "2", "rejected": "3"}) + "\n")
    small_config["data"]["preferences"] = {"kind": "jsonl", "path": str(path)}
    small_config["dpo"] = {"steps": 2}
    source = previewed(small_config, tmp_path)["preferences"]
    assert [shown.name for shown in source.examples] == ["row 0, chosen", "row 0, rejected"]
    assert "".join(piece.text for piece in source.examples[1].pieces if piece.learnt).startswith("3")


def test_the_page_escapes_what_data_say(small_config: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    said = [{"role": "user", "content": "<script>"}, {"role": "assistant", "content": "<b>"}]
    path.write_text(json.dumps({"messages": said}) + "\n")
    small_config["data"]["demonstrations"]["path"] = str(path)
    small_config["data"]["max_length"] = 40
    sources = [*previewed(small_config, tmp_path).values()]
    page = write_data_page("small", sources, tmp_path / "out" / "page.html").read_text()
    assert "<script>" not in page
    assert 'class="learnt"' in page
