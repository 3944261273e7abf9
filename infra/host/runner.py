"""Watches over one job: `python runner.py JOB_DIRECTORY [DESCRIPTOR]`.

Standard library only, so that it can be sent anywhere.

The directory holds `job.json` (command, limits). The runner detaches, takes the directory's lock, starts the command
in a session and process group of its own, and keeps these files beside it:

    log            what the command prints; attempts follow one another
    attempt.json   number of this attempt, and where log and metrics stood when it began
    heartbeat      touched every second while the runner lives
    attended       touched by whoever still wants the job
    pulse          touched by the command, if it likes; standing still for too long, it counts as hung
    cancel         its presence asks for the end; removed by whoever starts the job again
    status.json    how it ended; written last, once

Decision: the lock is the kernel's (`flock`), and the command inherits it. While anything of the job lives, however the
rest was killed, the lock is held and nothing else can start in its place; when all of it is gone, it is free.

Decision: the runner is the reaper of all that its command leaves behind (Linux), so that a process which left the
group, as servers' workers do, is ended with the rest.

The command's additional environment comes over standard input, as JSON: secrets are in no argument and in no file. The
descriptor is that of the lock `starting`. It is closed once this process has the job's lock, or has found it taken.
"""

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from typing import Any

TICK = 0.25
GRACE = 5.0
"""Seconds between TERM and KILL."""


PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main(directory: str, starting: int | None = None) -> int:
    environment: dict[str, str] = json.load(sys.stdin)
    os.chdir(directory)
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        return 0 if os.read(reader, 16) in (b"running", b"already") else 1
    os.close(reader)
    os.setsid()
    if os.fork():
        os._exit(0)
    lock = _take_lock()
    if starting is not None:
        os.close(starting)
    if lock is None:
        _tell(writer, b"already")
        return 0
    _begin_attempt()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    process = _start(lock, environment)
    _tell(writer, b"running")
    reason = _watch(process)
    _end_group(process)
    end_children()
    _write_json("status.json", {"exit_status": process.returncode, "reason": reason, "ended_at": time.time()})
    return 0


def _tell(writer: int, word: bytes) -> None:
    """Tell the process that asked for the start. If it has ended meanwhile, the runner goes on."""
    with suppress(BrokenPipeError):
        os.write(writer, word)
    os.close(writer)


def _take_lock() -> int | None:
    """The lock's descriptor, or None when the job is running. Whoever merely looks at the lock holds it briefly."""
    lock = os.open("lock", os.O_RDWR | os.O_CREAT, 0o600)
    for _ in range(10):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            time.sleep(0.05)
    return None


def _begin_attempt() -> None:
    for name in ("status.json", "failure.json", "pulse"):
        if os.path.exists(name):
            os.unlink(name)
    previous = _read_json("attempt.json")
    attempt = {"number": previous.get("number", 0) + 1, "log": _size("log"), "metrics": _size("metrics.jsonl")}
    _write_json("attempt.json", attempt)
    for name in ("heartbeat", "attended"):
        _touch(name)


def _start(lock: int, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    job = _read_json("job.json")
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    process = subprocess.Popen(
        job["command"],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=partial(_end_with, os.getpid()),
        pass_fds=[lock],
        env={**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", **environment},
    )
    os.close(log)
    return process


def _end_with(runner: int) -> None:
    """Ask the kernel to end this process when its runner ends, however that happens.

    It is asked before the command begins, because the runner may end before the command could ask.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != runner:
            os._exit(1)


def _watch(process: "subprocess.Popen[bytes]") -> str:
    """Wait for the command's end, or end it: at its limits, or when it is asked for. Returns the reason."""
    job = _read_json("job.json")
    end = time.monotonic() + job["time_limit"]
    while True:
        try:
            process.wait(TICK)
            return "exited"
        except subprocess.TimeoutExpired:
            pass
        _touch("heartbeat")
        if os.path.exists("cancel"):
            return "cancelled"
        if time.monotonic() > end:
            return "time limit"
        if time.time() - os.path.getmtime("attended") > job["unattended_limit"]:
            return "unattended"
        if os.path.exists("pulse") and time.time() - os.path.getmtime("pulse") > job["stall_limit"]:
            return "stalled"


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """TERM, then KILL, to the whole group; nothing of it stays behind."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, kind)
        except ProcessLookupError:
            break
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def end_children() -> None:
    """Kill what left its group; the kernel has made it this process's child."""
    end = time.monotonic() + GRACE
    while time.monotonic() < end:
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as children:
                orphans = [int(child) for child in children.read().split()]
        except OSError:
            return
        for orphan in orphans:
            try:
                os.kill(orphan, signal.SIGKILL)
                os.waitpid(orphan, 0)
            except (ProcessLookupError, ChildProcessError):
                continue
        if not orphans:
            return


def _touch(name: str) -> None:
    try:
        with open(name, "a"):
            os.utime(name)
    except OSError:
        pass


def _size(name: str) -> int:
    return os.path.getsize(name) if os.path.exists(name) else 0


def _read_json(name: str) -> dict[str, Any]:
    try:
        with open(name) as file:
            value: dict[str, Any] = json.load(file)
            return value
    except (OSError, ValueError):
        return {}


def _write_json(name: str, value: dict[str, Any]) -> None:
    """Write JSON to a file atomically. Tries again while the disk is full, since a follower waits for the file."""
    unfinished = name + ".unfinished"
    for _ in range(20):
        try:
            with open(unfinished, "w") as file:
                json.dump(value, file)
            os.replace(unfinished, name)
            return
        except OSError:
            if os.path.exists(unfinished):
                os.unlink(unfinished)
            time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
