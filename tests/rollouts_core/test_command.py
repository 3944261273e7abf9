"""The command tells what is missing before it imports anything of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts_core import command

ROOT = Path(__file__).parents[2]


def run(*path: Path) -> "subprocess.CompletedProcess[str]":
    code = "import sys; from rollouts_core.command import main; sys.argv[1:] = ['runs', '--help']; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, "-c", code], cwd="/", env=environment, capture_output=True, text=True, timeout=60
    )


def test_a_package_of_another_that_hides_ours_is_told(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "__init__.py").write_text("raise SystemExit('imported')")
    done = run(tmp_path, ROOT)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: the package `tasks` is another's here ({tmp_path})")
    assert len(done.stderr.splitlines()) == 1


def test_with_nothing_in_the_way_it_runs() -> None:
    done = run(ROOT)
    assert done.returncode == 0, done.stderr
    assert "list runs, the latest first" in done.stdout


def test_the_extra_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "NEEDED", {"prefect_of_nobody": "pipeline"})
    assert command.main() == 1
    assert "pip install 'rollouts[pipeline]'" in capsys.readouterr().err
