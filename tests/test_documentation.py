"""Every command in README and docs/ is one that there is; the pages of what users do are followed, in order."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.cli import _parser
from tests.cluster import Cluster
from tests.conftest import COMMAND_DEADLINE
from tests.hosts import HostMachine

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLLOWED = ["first-run", "your-data", "resuming", "evaluation", "engines", "prefect"]
READY = {"rollouts up": "Ctrl-C", "prefect worker": "started"}
"""Commands that go on until they are ended, and what they say when they are ready."""
SMALLER = {
    "steps=500": "steps=30", "warmup_steps=50": "warmup_steps=3", "steps=150": "steps=4",
    "steps_per_segment=50": "steps_per_segment=2", "batch_size=64": "batch_size=4",
}  # fmt: skip
"""The demo's config, so much smaller that a page is followed in a minute or two."""


def commands_of(page: Path) -> list[str]:
    """The lines of its shell blocks, without what is said beside them."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [re.sub(r"\s+# .*", "", line).strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def named_files(page: Path) -> dict[str, str]:
    """Files that a page gives whole: their name in backticks, a colon, and a block of Python."""
    return dict(re.findall(r"`([\w/]+\.py)`:\n\n```python\n(.*?)```", page.read_text(), re.DOTALL))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_those_there_are(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands_of(page):
        program, *arguments = shlex.split(command.split(" > ")[0])
        if program == "rollouts":
            _parser().parse_args(arguments)
        elif program == "make":
            assert arguments[0] in targets
        elif program == "python":
            assert (ROOT / (arguments[1].replace(".", "/") + ".py")).is_file() or arguments[1] in ("pip", "pytest")
        elif program == "sh":
            assert (ROOT / arguments[0]).is_file()
        else:
            assert program in ("prefect", "pip"), command
    for word in re.findall(r"`make ([\w-]+)`", page.read_text()):
        assert word in targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A newcomer's directory, with the demo made small."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs", ignore=shutil.ignore_patterns("__pycache__"))
    config = tmp_path / "configs" / "arithmetic.py"
    text = config.read_text()
    for old, new in SMALLER.items():
        assert old in text
        text = text.replace(old, new)
    config.write_text(text)
    (tmp_path / "configs" / "calculator.py").unlink()
    return tmp_path


@pytest.fixture
def going_on() -> Iterator[list["subprocess.Popen[str]"]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.send_signal(signal.SIGINT)
        process.wait(COMMAND_DEADLINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLLOWED)
def test_a_page_can_be_followed(
    name: str,
    project: Path,
    command_environment: dict[str, str],
    going_on: list["subprocess.Popen[str]"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = ROOT / "docs" / f"{name}.md"
    for path, content in named_files(page).items():
        (project / path).write_text(content)
    programs = project / "programs"
    _write_programs(programs)
    environment = {**command_environment, "PATH": f"{programs}:{os.environ['PATH']}"}
    if name in ("evaluation", "engines"):
        keep = ["--set", "rl.rollouts.keep_batches=true"]
        _follow("rollouts run configs/arithmetic.py " + " ".join(keep), project, environment, going_on)
    for command in commands_of(page):
        _follow(command, project, environment, going_on)


@pytest.mark.slow
def test_the_page_of_remote_machines_can_be_followed(
    project: Path, command_environment: dict[str, str], hosts: tuple[HostMachine, HostMachine]
) -> None:
    """On a real host, whose address, key and Python stand for the page's."""
    host = hosts[0]
    programs = project / "programs"
    _write_programs(programs)
    inventory = project / "added.toml"
    environment = {
        **command_environment,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "ROLLOUTS_MACHINES": str(inventory),
    }
    pages = [ROOT / "docs" / "machines.md", ROOT / "docs" / "engine-machines.md"]
    for command in [command for page in pages for command in commands_of(page)]:
        if "machines add" in command:
            shutil.copy(os.environ["ROLLOUTS_MACHINES"], inventory)
            told = inventory.read_text().replace(f"[{host.name}]", "[gpu1]")
            inventory.write_text(told.replace(f"[{hosts[1].name}]", "[gpu2]"))
        elif "checksums" not in command:  # the page's run has no servers
            _follow(command, project, environment, [])


@pytest.mark.slow
def test_the_page_of_clusters_can_be_followed(
    project: Path, command_environment: dict[str, str], cluster: Cluster
) -> None:
    """On a real Slurm, whose inventory stands for the page's `machines add`."""
    programs = project / "programs"
    _write_programs(programs)
    path, inventory = f"{programs}:{os.environ['PATH']}", os.environ["ROLLOUTS_MACHINES"]
    environment = {**command_environment, "PATH": path, "ROLLOUTS_MACHINES": inventory}
    for command in commands_of(ROOT / "docs" / "slurm.md"):
        if "machines add" not in command:
            _follow(command, project, environment, [])
    assert not cluster.jobs()


def _follow(command: str, project: Path, environment: dict[str, str], going_on: list["subprocess.Popen[str]"]) -> None:
    runs = _runs(project, environment)
    if re.search(r"\b(RUN|OTHER)\b", command):
        command = re.sub(r"\bOTHER\b", runs[-1], re.sub(r"\bRUN\b", runs[0], command))
    ready = next((said for begins, said in READY.items() if command.startswith(begins)), None)
    if ready is None:
        done = subprocess.run(
            command, shell=True, cwd=project, env=environment, capture_output=True, text=True, timeout=COMMAND_DEADLINE
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return
    environment = {
        name: value for name, value in environment.items() if name != "PREFECT_API_URL" or "up" not in command
    }
    process = subprocess.Popen(
        shlex.split(command), cwd=project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    going_on.append(process)
    assert process.stdout is not None
    assert any(ready in line for line in process.stdout), f"{command} never said {ready!r}"


def _runs(project: Path, environment: dict[str, str]) -> list[str]:
    """The ids of completed runs, the latest first."""
    home = project / ".rollouts" / "runs"
    records = [json.loads((path / "run.json").read_text()) for path in home.glob("*")] if home.is_dir() else []
    done = [record for record in records if record["state"] == "Completed"]
    return [record["run_id"] for record in sorted(done, key=lambda record: record["started_at"], reverse=True)]


def _write_programs(folder: Path) -> None:
    """`rollouts` and `prefect` as this interpreter has them."""
    folder.mkdir()
    for name, module in {"rollouts": "flows.cli", "prefect": "prefect"}.items():
        (folder / name).write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m {module} "$@"\n')
        (folder / name).chmod(0o755)
