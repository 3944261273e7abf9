"""The library from a wheel in an environment without Prefect, paramiko and FastAPI: its page runs there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rollouts_core.library.test_page import BLOCKS

ROOT = Path(__file__).parents[3]
ABSENT = ("prefect", "paramiko", "fastapi", "matplotlib", "sqlalchemy", "uvicorn")
INSTALL_SECONDS = 1200


@pytest.mark.slow
def test_the_recipes_run_from_a_wheel(tmp_path: Path) -> None:
    uv = [sys.executable, "-m", "uv"]
    quiet = {"check": True, "timeout": INSTALL_SECONDS, "stdout": subprocess.DEVNULL}
    source = tmp_path / "source"
    for name in ("rollouts_core", "flows", "tasks", "infra", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copyfile(ROOT / name, source / name)
    subprocess.run([*uv, "build", "-q", "--wheel", "--out-dir", str(tmp_path), str(source)], **quiet)  # type: ignore[call-overload]
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*uv, "venv", "-q", "--python", sys.executable, str(tmp_path / "venv")], **quiet)  # type: ignore[call-overload]
    python = str(tmp_path / "venv" / "bin" / "python")
    pins = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if re.match(r"torch==|transformers==", line)
    ]
    (tmp_path / "pins.txt").write_text("\n".join(pins))
    install = [*uv, "pip", "install", "-q", "--python", python, "-c", str(tmp_path / "pins.txt"), str(wheel)]
    subprocess.run(install, **quiet)  # type: ignore[call-overload]
    looks = f"import importlib.util as u; print([name for name in {ABSENT} if u.find_spec(name)])"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def output_of(*arguments: str) -> str:
        done = subprocess.run(
            [python, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert output_of("-c", looks).strip() == "[]"
    for number, (_, code) in enumerate(BLOCKS):
        (tmp_path / f"block-{number}.py").write_text(code)
        assert output_of(f"block-{number}.py")
    command = subprocess.run(
        [str(Path(python).with_name("rollouts")), "runs"], capture_output=True, text=True, timeout=60
    )
    assert command.returncode == 1 and "rollouts[pipeline]" in command.stderr
