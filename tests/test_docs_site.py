"""The site of the docs builds: every page in its menu, no dead link, every public name with its signature."""

import subprocess
import sys
from pathlib import Path

import rollouts_core as rc

ROOT = Path(__file__).parents[1]


def test_the_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "not included in the" not in done.stderr
    reference = (tmp_path / "reference" / "index.html").read_text()
    from rollouts_core import _public

    missing = [name for name in dir(rc) if f'id="{_public()[name]}.{name}"' not in reference]
    assert not missing
    assert "search_index" in " ".join(path.name for path in (tmp_path / "search").iterdir())
