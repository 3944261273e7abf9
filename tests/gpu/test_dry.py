"""What is ready for a GPU runs here, small, on the CPU; and its runner keeps what there is when a part goes wrong."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.gpu import __main__ as runner
from tests.gpu import adapters, attention, curves, engine, grpo, rows, speed

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (attention, 4),
        (engine, 9),
        (adapters, 3),
        (speed, 14),
        (grpo, 3),
        pytest.param(curves, 2, marks=pytest.mark.slow),
    ],
    ids=lambda value: value.__name__ if isinstance(value, ModuleType) else "",
)
def test_every_part_runs_on_the_cpu_and_finds_nothing_wrong(
    part: ModuleType, told: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speed, "REPEATS", 1)
    monkeypatch.setattr(engine, "ANSWER", 8)
    monkeypatch.setattr("torch.nn.Module.compile", lambda self, **options: None)  # which takes its time
    part.main("cpu")
    found = [row for line in capsys.readouterr().out.splitlines() if (row := rows.read(line))]
    assert len(found) == told
    assert [row for row in found if row.ok is False] == []


def test_a_part_that_hangs_or_fails_costs_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runner, "PARTS", {"hangs": 5, "fails": 60, "works": 60, "is_wrong": 60})
    package = tmp_path / "tests" / "gpu"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package.parent / "__init__.py").touch()
    tell = 'print(\'ROW {"name": "a", "value": "b", "ok": true}\', flush=True)\n'
    (package / "hangs.py").write_text(f"{tell}import time; time.sleep(600)")
    (package / "fails.py").write_text(f"{tell}raise ValueError('out of luck')")
    (package / "works.py").write_text(tell)
    (package / "is_wrong.py").write_text(tell.replace("true", "false"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["gpu", str(tmp_path / "results")])
    assert runner.main() == 1
    parts = json.loads((tmp_path / "results" / "gpu.json").read_text())["parts"]
    assert [part["state"] for part in parts] == ["had not ended after 5 s", "ended with exit status 1", "done", "done"]
    assert all(part["rows"] == [{"name": "a", "value": "b", "ok": part["part"] != "is_wrong"}] for part in parts)
    assert "out of luck" in parts[1]["last_lines"][-1]
    table = (tmp_path / "results" / "gpu.md").read_text()
    assert "| hangs | the part itself | had not ended after 5 s | **wrong** |" in table
    assert "| works | a | b | ok |" in table and "| is_wrong | a | b | **wrong** |" in table


@pytest.mark.slow
def test_the_whole_command_runs_dry(tmp_path: Path) -> None:
    command = ["sh", "tests/gpu/run.sh", "--dry"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "OUT": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert [part["part"] for part in parts] == list(runner.PARTS)
