"""A run finds the server of the `rollouts up` that runs, and no other; and what leads a run imports no torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from flows.found_server import UpServer, announced, find_server

SERVER = UpServer("http://127.0.0.1:4200/api", "http://127.0.0.1:9", "/outputs")
ANNOUNCER = """
import time
from flows.found_server import UpServer, announced
with announced(UpServer("http://x/api", "http://y", "/z")):
    print("there", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))


def test_it_is_found_for_as_long_as_it_lasts() -> None:
    assert find_server() is None
    with announced(SERVER):
        assert find_server() == SERVER
    assert find_server() is None


def test_the_first_of_two_is_found() -> None:
    with announced(SERVER), announced(UpServer("http://other/api", "", "")):
        assert find_server() == SERVER


def test_one_that_was_killed_is_not_found(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ANNOUNCER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert find_server() == UpServer("http://x/api", "http://y", "/z")
        process.kill()
    assert (tmp_path / "rollouts-up" / "server.json").exists()
    assert find_server() is None


@pytest.mark.parametrize("flow", ["flows.post_train", "flows.evaluate", "flows.gc"])
def test_what_leads_a_run_imports_no_torch(flow: str) -> None:
    code = (
        f"import sys, flows.cli, {flow}; print([m for m in ('torch', 'transformers', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
