"""rollouts data: in the terminal, as JSON, and as a page."""

from collections.abc import Callable
from pathlib import Path

from tests.conftest import Done

Rollouts = Callable[..., Done]


def test_data_is_shown_and_a_page_written(rollouts: Rollouts, config_file: Callable[..., Path], tmp_path: Path) -> None:
    config = config_file()
    done = rollouts("data", config, "--examples", "1")
    assert done.status == 0, done.err
    assert "demonstrations" in done.out
    assert "of them learnt" in done.out
    assert "<|assistant|>" in done.out
    page = tmp_path / "outputs" / "data" / "small.html"
    assert f"page    {page}" in done.out
    assert page.exists()
    told = rollouts("data", config, "--json", "--rows", "2").json()
    assert [source["rows"] for source in told["sources"]] == [2, 2, 2]
    assert not list((tmp_path / ".rollouts").glob("artifacts/*"))


def test_faulty_data_fails_it(rollouts: Rollouts, config_file: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"other": 1}\n' * 5)
    config = config_file(data={"prompts": {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl")}})
    done = rollouts("data", config)
    assert done.status == 1
    assert done.out.count("no list of messages") == 1
    assert "rows.jsonl:1, 2, 3 and 2 more rows" in done.out
    assert "--rows: read at least one" in rollouts("data", config, "--rows", "0").err
