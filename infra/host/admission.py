"""The keys of a run in `~/.ssh/authorized_keys` of an engine machine: good for one port, for an hour, for one job.

Decision: the job that keeps the servers writes the line itself and renews it while it lives. The line names the job's
directory, so that others can remove the line of a job that was killed. A line that nobody removes expires.

Decision: if machines share one home, a key that several of their jobs admit may use the ports of all of them, since an
SSH server reads only the first line of a key.

The line lets its holder open connections to that port of the loopback, and run nothing. OpenSSH has no word against
connections to Unix sockets beside them; they are made with the rights of the same user.
"""

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from infra.host import allocated
from rollouts_core.store.locks import is_held

GOOD_FOR_SECONDS = 3600.0
RENEW_SECONDS = 900.0
MARK = "rollouts-servers:"
OPEN = re.compile(r',permitopen="127\.0\.0\.1:(\d+)"')


def admit(directory: Path, public_keys: Sequence[str], port: int) -> None:
    """Let the keys reach the port, from now on for an hour; in place of what this job let in before."""
    until = time.strftime("%Y%m%d%H%M", time.localtime(time.time() + GOOD_FOR_SECONDS))
    allowed = f'restrict,port-forwarding,permitlisten="127.0.0.1:1",command="false",expiry-time="{until}"'
    keys = [" ".join(public_key.split()[:2]) for public_key in public_keys]
    own = [f'{allowed},permitopen="127.0.0.1:{port}" {key} {MARK}{directory.resolve()}' for key in keys]
    rewrite(lambda lines: _joined([*(line for line in lines if not _is_of(line, directory)), *own]))


def dismiss(directory: Path) -> None:
    """Take the key of this job out."""
    rewrite(lambda lines: _joined([line for line in lines if not _is_of(line, directory)]))


def sweep() -> None:
    """Take out the keys of jobs that do not run any more."""
    if any(MARK in line for line in lines()):
        rewrite(lambda lines: [line for line in lines if MARK not in line or _lives(_directory_in(line))])


def lines() -> list[str]:
    """The lines of the file; none where we may not write to it, because then it has none of ours."""
    file = Path.home() / ".ssh" / "authorized_keys"
    if not os.access(file, os.R_OK) or not os.access(file.resolve().parent, os.W_OK):
        return []
    return file.read_text().splitlines()


def rewrite(change: Callable[[list[str]], list[str]]) -> None:
    """Change lines of authorized_keys; the other lines stay. The file is written only if it changes."""
    home = Path.home() / ".ssh"
    file = Path(os.path.realpath(home / "authorized_keys"))
    with _alone(home):
        before = file.read_text() if file.exists() else ""
        lines = before.splitlines()
        after = change(lines)
        if after == lines:
            return
        unfinished = file.with_name(f"{file.name}.rollouts")
        unfinished.touch(mode=0o600)
        unfinished.write_text("".join(f"{line}\n" for line in after))
        unfinished.replace(file)


def _joined(lines: Sequence[str]) -> list[str]:
    """The lines of one key all have the ports of its jobs, each its own first."""
    ports: dict[str, list[str]] = {}
    for line in lines:
        if MARK in line:
            ports.setdefault(_key_in(line), []).append(OPEN.findall(line)[0])
    joined = []
    for line in lines:
        if MARK in line:
            own = OPEN.findall(line)[0]
            opens = [own, *sorted({*ports[_key_in(line)]} - {own})]
            line = OPEN.sub("", line).replace(
                " ", "".join(f',permitopen="127.0.0.1:{port}"' for port in opens) + " ", 1
            )
        joined.append(line)
    return joined


def _key_in(line: str) -> str:
    return " ".join(line.partition(MARK)[0].split()[1:])


def _is_of(line: str, directory: Path) -> bool:
    return MARK in line and _directory_in(line) == directory.resolve()


def _lives(directory: Path) -> bool:
    """Whether the job of a directory runs, here or in an allocation."""
    return is_held(directory / "lock") or allocated.poll(directory) is not None


def _directory_in(line: str) -> Path:
    return Path(line.partition(MARK)[2].strip())


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    home.mkdir(exist_ok=True, mode=0o700)
    with (home / ".rollouts.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
