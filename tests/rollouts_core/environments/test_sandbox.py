"""Code that is up to no good, run for real: what it cannot reach, use up, or leave behind."""

import os
import socket
import tempfile
import time
from functools import partial
from pathlib import Path

import anyio
import pytest

from rollouts_core.environments import sandbox
from rollouts_core.environments.sandbox import Ran, SandboxLimits, check_sandbox, run_python
from rollouts_core.errors import BadInput

SECRET = "a-secret-of-the-trainer"


@pytest.fixture(autouse=True)
def _shut_in() -> None:
    try:
        anyio.run(check_sandbox)
    except BadInput as error:
        pytest.skip(str(error))


def ran(code: str, **limits: int) -> Ran:
    return anyio.run(partial(run_python, code, SandboxLimits(**limits)))


def left(mark: str) -> list[int]:
    """Processes whose command line or code holds the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_code_runs_and_its_output_and_status_are_told() -> None:
    assert ran("print(sum(range(10)))") == Ran("45\n", 0)
    assert ran("import sys; print('x', file=sys.stderr); sys.exit(3)") == Ran("x\n", 3)
    failed = ran("def f():\n    return 1 / 0\nf()")
    assert failed.exit_status == 1
    assert failed.output.startswith('Traceback (most recent call last):\n  File "<code>", line 3')
    assert failed.output.endswith("ZeroDivisionError: division by zero\n")
    assert "SyntaxError" in ran("def").output
    assert ran("import json, random; open('a', 'w').write('b'); print(open('a').read())").output == "b\n"


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        assert "Error" in ran(code).output
    assert "Error" in ran("import socket; socket.create_connection(('10.0.0.1', 80), 2)").output


def test_nothing_outside_is_read_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", SECRET)
    (tmp_path / "secret").write_text(SECRET)
    processes = (f"/proc/{name}/environ" for name in ("self", "1", os.getpid()))
    for place in (tmp_path / "secret", "/etc/passwd", *processes):
        assert "PermissionError" in ran(f"print(open({str(place)!r}, 'rb').read())").output, place
    assert SECRET not in ran("import os; print(dict(os.environ))").output
    assert "PermissionError" in ran(f"import os; print(os.listdir({str(tmp_path)!r}))").output
    assert "Error" in ran(f"open({str(tmp_path / 'new')!r}, 'w')").output
    assert "Error" in ran(f"import os; os.remove({str(tmp_path / 'secret')!r})").output
    assert "Error" in ran(f"import os; os.symlink({str(tmp_path / 'secret')!r}, 'l'); print(open('l').read())").output
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_locks_are_not_opened_from_within() -> None:
    mount = "import ctypes; print(ctypes.CDLL(None, use_errno=True).mount(b'none', b'/usr', b'tmpfs', 0, None))"
    assert ran(mount).output == "-1\n"
    assert "Error" in ran("import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40))").output
    assert "Error" in ran(f"import os, signal; os.kill({os.getpid()}, signal.SIGKILL)").output


def test_what_takes_too_long_is_ended() -> None:
    began = time.monotonic()
    for code in ("while True: pass", "import time; time.sleep(600)", "import signal\nsignal.pause()"):
        assert ran(code, seconds=1) == Ran("", 124, timed_out=True)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    "code",
    [
        "x = bytearray(10 ** 10)",
        "open('a', 'wb').write(b'0' * (200 << 20))",
        "import os\nfor n in range(100000): open(str(n), 'w')",
    ],
)
def test_what_takes_too_much_fails(code: str) -> None:
    done = ran(code, memory_mb=512, disk_mb=16, seconds=5)
    assert done.exit_status != 0
    assert any(word in done.output for word in ("MemoryError", "OSError", "BlockingIOError")), done.output


def test_endless_output_is_cut() -> None:
    done = ran("while True: print('x' * 1000)", seconds=1, output_chars=5000)
    assert (len(done.output), done.timed_out) == (5000, True)


SPAWN = ["os.fork()", "os.posix_spawn('/bin/true', ['true'], {})", "subprocess.run(['/bin/true'])"]


@pytest.mark.parametrize("how", SPAWN)
def test_it_stays_one_process(how: str) -> None:
    assert "PermissionError" in ran(f"import os, subprocess; {how}").output


def test_threads_are_its_own() -> None:
    code = "import threading as t; w = t.Thread(target=print, args=['x']); w.start(); w.join()"
    assert ran(code).output == "x\n"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the directories of code are made; the command lines of their processes name it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_nothing_is_left_of_threads_that_never_end(directory: Path) -> None:
    code = "import threading, time\nfor n in range(4): threading.Thread(target=time.sleep, args=[600]).start()"
    assert ran(code, seconds=1).timed_out
    assert not left(str(directory))
    assert not list(directory.iterdir())


def test_a_caller_that_stops_waiting_leaves_nothing(directory: Path) -> None:
    async def given_up() -> None:
        with anyio.move_on_after(1.0):
            await run_python("import time; time.sleep(600)", SandboxLimits(seconds=60))

    anyio.run(given_up)
    assert not left(str(directory))
    assert not list(directory.iterdir())


def test_a_machine_that_cannot_shut_code_in_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.guard, "version", lambda: 0)
    with pytest.raises(BadInput, match=r"only in a sandbox"):
        anyio.run(check_sandbox)
