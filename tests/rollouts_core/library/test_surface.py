"""The public surface: documented whole, imported when it is used, and changed only where the changelog says so."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rollouts_core as rc
from rollouts_core import _public
from tests.rollouts_core.library.surface import sentence_of, surface

ROOT = Path(__file__).parents[3]
RELEASED = Path(__file__).with_name("released.json")
"""The surface of the last release. Write it anew when one is made: `python -m tests.rollouts_core.library.release`."""


def unreleased() -> str:
    return (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]


def test_what_changed_since_the_release_is_in_the_changelog() -> None:
    before, now = json.loads(RELEASED.read_text()), json.loads(json.dumps(surface()))
    changed = [name for name in sorted({**before, **now}) if before.get(name) != now.get(name)]
    untold = [name for name in changed if f"`{name}`" not in unreleased()]
    assert not untold, (
        f"{', '.join(untold)}: what is public has changed since the last release. Say so in CHANGELOG.md, under its "
        "first heading, with the name in backticks"
    )


def test_every_name_has_a_sentence_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    told = dict(re.findall(r"^\| `rc\.(\w+)` \| (.+) \|$", page, re.MULTILINE))
    assert told == {name: sentence_of(name).replace("|", "\\|") for name in dir(rc)}
    assert all(re.match(r"[A-Z0-9`/-]", sentence) for sentence in told.values())
    shown = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(f"{module}.{name}" for name, module in _public().items())


def test_importing_it_imports_no_torch() -> None:
    code = (
        "import sys, rollouts_core as rc; rc.RLConfig; rc.BadInput; dir(rc)\n"
        "print(sorted({'torch', 'transformers', 'pyarrow', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_name_that_is_not_public_is_told() -> None:
    with pytest.raises(AttributeError, match="no public 'gpro'"):
        rc.gpro  # type: ignore[attr-defined]  # noqa: B018


def test_a_star_import_gives_all() -> None:
    found: dict[str, object] = {}
    exec("from rollouts_core import *", found)
    assert set(dir(rc)) <= set(found)
