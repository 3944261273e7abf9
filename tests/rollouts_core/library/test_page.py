"""The library's page: every block of Python on it runs, in its order."""

import re
import runpy
from pathlib import Path

import pytest

from tests.rollouts_core.library.lines import lines_of

PAGE = Path(__file__).parents[3] / "docs" / "library.md"
BLOCKS = re.findall(r"^## (.+?)\n.*?^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
MOST_LINES = {
    "Supervised fine-tuning": 15, "GRPO": 20, "The loop, written out": 25, "A new algorithm": 10,
    "An agent in an environment": 30,
}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Later blocks use what earlier ones have saved."""
    return tmp_path_factory.mktemp("page")


@pytest.mark.parametrize(("title", "code"), BLOCKS, ids=[title for title, _ in BLOCKS])
def test_each_block_runs(
    title: str, code: str, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(directory)
    (directory / "block.py").write_text(code)
    runpy.run_path("block.py")
    assert capsys.readouterr().out
    assert lines_of(code) <= MOST_LINES[title]


def test_the_page_has_them_all() -> None:
    assert [title for title, _ in BLOCKS] == list(MOST_LINES)
