"""Runs Python code that a model wrote, in a process that can do no harm: `run_python(code, limits)`.

`guard.py` has the restrictions. If the kernel lacks them (Landlock of Linux 6.2 or later, user namespaces), no code is
run: `check_sandbox` reports this before anything starts.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import anyio
from anyio.abc import ByteReceiveStream, Process

from rollouts_core.environments import guard
from rollouts_core.errors import BadInput

GUARD = Path(guard.__file__)
START_SECONDS = 10.0
"""For the interpreter and the locks, before the code begins."""


@dataclass(frozen=True)
class SandboxLimits:
    seconds: int = 5
    memory_mb: int = 1024
    disk_mb: int = 32
    output_chars: int = 10_000
    """The number of characters of output that are kept; the rest is dropped."""


@dataclass(frozen=True)
class Ran:
    output: str
    """Standard output and errors, as they came."""
    exit_status: int
    """128 and more: that much more than the signal that ended it."""
    timed_out: bool = False


async def run_python(code: str, limits: SandboxLimits = SandboxLimits()) -> Ran:
    """Run code to its end or its deadline; nothing of it is left then. What cannot be shut in is not run."""
    directory = tempfile.mkdtemp(prefix="rollouts-sandbox-")
    told = json.dumps(asdict(limits) | {"directory": directory})
    process = await anyio.open_process(
        [sys.executable, "-I", str(GUARD), told],
        env=_environment(directory),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    output: list[bytes] = []
    status = guard.TIMED_OUT
    try:
        with anyio.move_on_after(limits.seconds + START_SECONDS):
            assert process.stdin is not None and process.stdout is not None
            await process.stdin.send(code.encode())
            await process.stdin.aclose()
            await _gather(process.stdout, output, limits.output_chars)
            status = await process.wait()
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)
            shutil.rmtree(directory, ignore_errors=True)
    return Ran(b"".join(output).decode(errors="replace"), status, status == guard.TIMED_OUT)


async def check_sandbox() -> None:
    """Raises `BadInput` where code cannot be shut in."""
    if sys.platform != "linux" or guard.version() < guard.LEAST_VERSION:
        raise BadInput("a model's code runs only in a sandbox, which needs Linux 6.2 or later with Landlock enabled")
    ran = await run_python("print('ready')")
    if ran.output.strip() != "ready":
        raise BadInput(f"a model's code can't be put into a sandbox here: {ran.output.strip().splitlines()[-1:]}")


async def _gather(stream: ByteReceiveStream, output: list[bytes], limit: int) -> None:
    kept = 0
    async for piece in stream:
        output.append(piece[: max(0, limit - kept)])
        kept += len(piece)


async def _end(process: Process) -> None:
    """The guard's whole group; what runs inside dies with its namespace."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.aclose()


def _environment(directory: str) -> Mapping[str, str]:
    """The environment of the program: none of our own variables are in it."""
    return {"PATH": "/usr/bin:/bin", "HOME": directory, "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}
