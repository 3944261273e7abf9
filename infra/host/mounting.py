"""Compute nodes that do not see the directory `work` of their login node: each mounts it from there, by sshfs.

    mounted DIRECTORY NODE   on a node: mount, then keep jobs in the allocation (see `allocation`)

Decision: with the mount, everything is as on a cluster with a shared file system: checkpoints outlive an allocation,
and the login node reads logs. It is slower, so `local_disk` and a store by URL help where much is read or written.

Decision: an agent mounts in a mount namespace of its own (`unshare`, which needs no rights). The mount is gone when the
last process of the allocation is, however that ends, and two allocations on one node do not meet.

Decision: the key is made on the login node for one allocation. It allows reading and writing files there. So it is sent
over the standard input of a step and is never on a node's disk, and neither is the agent itself. Both are in memory
that ends with their process (`memfd_create`).
"""

import base64
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from infra.host import admission, allocation, node_socket, slurm
from infra.host.files import read_json
from infra.host.links import KEY, make_key
from infra.host.ssh_client import client_command, server_name
from infra.host.system import end_with_parent

MARK = "rollouts-files:"
MARGIN_MINUTES = 60
WAIT_SECONDS = 900.0
"""How long a node waits for the key: whoever has the login node's agent open brings it."""
MOUNT_SECONDS = 10.0
STEP_SECONDS = 12.0
DONE, FILES = "mounted", "files"
"""The message of a node that has mounted, and the name of its socket."""
FRESH = "dir_cache=no,attr_timeout=0,entry_timeout=0,negative_timeout=0,reconnect"
"""Options of sshfs with which changes on the login node are seen at once."""
LOADER = """
import base64, os, sys
def kept(data):
    held = os.memfd_create("rollouts", 0)
    while data:
        data = data[os.write(held, data):]
    os.lseek(held, 0, 0)
    return held
archive, _, rest = sys.stdin.buffer.read().partition(b"\\n")
held = kept(base64.b64decode(archive))
os.dup2(kept(rest), 0)
os.execv(sys.executable, [sys.executable, f"/proc/{os.getpid()}/fd/{held}", "mounted", *sys.argv[1:]])
"""
"""Takes in the agent, and runs it from memory; behind it on standard input is what it is told."""
BRINGER = """
import os, socket, struct, sys
with socket.socket(socket.AF_UNIX) as there:
    there.connect("\\0" + sys.argv[1])
    if struct.unpack("3i", there.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1] == os.getuid():
        there.sendall(sys.stdin.buffer.read())
        there.shutdown(socket.SHUT_WR)
        print(there.recv(4096).decode())
"""


def admit(directory: Path, minutes: int) -> None:
    """On the login node: make the key of an allocation. It allows access to files here for so many minutes."""
    public = " ".join(make_key(directory).split()[:2])
    until = time.strftime("%Y%m%d%H%M", time.localtime(time.time() + 60 * (minutes + MARGIN_MINUTES)))
    own = f'restrict,command="internal-sftp",expiry-time="{until}" {public} {MARK}{directory.resolve()}'
    admission.rewrite(lambda lines: [*_of_living(lines, {directory.resolve()}), own])


def bring(directory: Path, told: Mapping[str, Any]) -> None:
    """Bring the key to an allocation that runs and whose agent has not begun since it was queued the last time. `told`:
    what the allocation is. A step that Slurm refuses, or a node that does not listen yet, is asked again later."""
    found = slurm.running(told["slurm"])
    if found is None or found[1] <= read_json(directory / "node-0.json").get("turn", -1):
        return
    admit(directory, told["minutes"])
    given = json.dumps({**told["mount"], "key": (directory / KEY).read_text()})
    step = ["srun", f"--jobid={found[0]}", "--overlap", "--nodes=1", "--ntasks=1", "--relative=0", "--quiet",
            "--chdir=/", told["python"], "-c", BRINGER, node_socket.name_of(directory, FILES)[1:]]  # fmt: skip
    with suppress(OSError, subprocess.TimeoutExpired):
        said = subprocess.run(step, input=given, text=True, capture_output=True, timeout=STEP_SECONDS).stdout
        if said.strip() not in ("", DONE):
            (directory / "log").write_text(said)


def dismiss(directories: Collection[Path]) -> None:
    """Take out the keys of these allocations, and of all that are gone."""
    ended = {directory.resolve() for directory in directories}
    if any(MARK in line and _is_gone(_directory_in(line), ended) for line in admission.lines()):
        admission.rewrite(lambda lines: _of_living(lines, ended))


def script(python: str, archive: Path, directory: str, modules: list[str]) -> str:
    """The batch script: the agent goes along in it, and nothing else."""
    data = base64.b64encode(archive.read_bytes()).decode()
    command = " ".join(f"'{part}'" for part in _command(python))
    return "\n".join(["#!/bin/bash -l", *modules, f"exec {command} \"{directory}\" 0 <<'END'", data, "END", ""])


def main(directory: Path, word: str) -> int:
    """On a node: mount the directory, then keep jobs until no run needs the allocation."""
    if word != "0":
        told = json.load(sys.stdin)
        with _mounted(told, directory):
            return allocation.main(directory, allocation.node_number(word))
    with ExitStack() as mounted:
        with _brought(directory) as (given, answer):
            told = json.loads(given)
            try:
                mounted.enter_context(_mounted(told, directory))
            except OSError as error:
                answer.sendall(str(error).encode())
                return 1
            answer.sendall(DONE.encode())
        with (directory / "log").open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        archive = base64.b64encode(Path(sys.argv[0]).read_bytes())
        return allocation.main(directory, 0, (_command(sys.executable), archive + b"\n" + given))


def _command(python: str) -> list[str]:
    return ["unshare", "--user", "--map-current-user", "--keep-caps", "--mount", python, "-c", LOADER]


@contextmanager
def _brought(directory: Path) -> Iterator[tuple[bytes, socket.socket]]:
    """The bytes that the login node brings, and the socket for the answer to it."""
    with node_socket.listening(directory, FILES, WAIT_SECONDS) as asked:
        while True:
            connection, _ = asked.accept()
            connection.settimeout(STEP_SECONDS)
            with connection, suppress(TimeoutError):
                brought = b""
                while node_socket.user_behind(connection) == os.getuid() and (piece := connection.recv(65536)):
                    brought += piece
                if brought:
                    yield brought, connection
                    return


@contextmanager
def _mounted(told: Mapping[str, Any], directory: Path) -> Iterator[None]:
    """Mount the directory and wait until it can be read. Raises `OSError` with the last lines of sshfs."""
    work = Path(told["work"])
    work.mkdir(parents=True, exist_ok=True)
    key, hosts = _in_memory(told["key"]), _in_memory(f"{server_name(told['host'], told['port'])} {told['host_key']}\n")
    words = [f"'{word}'" for word in client_command(told["port"], told["user"], Path(hosts), Path(key))]
    ssh, said = _in_memory(f'exec {" ".join(words)} "$@"\n'), _in_memory("")
    source = f"{told['host']}:{work}"
    command = ["sshfs", "-f", "-o", f"ssh_command=sh {ssh}", "-o", FRESH, source, str(work)]
    with open(said, "ab") as errors:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=errors, preexec_fn=end_with_parent)
    try:
        end = time.monotonic() + MOUNT_SECONDS
        while not os.path.exists(f"{directory}/allocation.json"):
            if process.poll() is not None or time.monotonic() > end:
                raise OSError(f"{source} can't be mounted: {Path(said).read_text().strip() or 'sshfs says nothing'}")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()


def _in_memory(content: str) -> str:
    """A file that ends with this process, and that it alone may read."""
    held = os.memfd_create("rollouts", 0)
    os.fchmod(held, 0o600)
    os.write(held, content.encode())
    return f"/proc/{os.getpid()}/fd/{held}"


def _of_living(lines: list[str], ended: Collection[Path]) -> list[str]:
    return [line for line in lines if MARK not in line or not _is_gone(_directory_in(line), ended)]


def _is_gone(directory: Path, ended: Collection[Path]) -> bool:
    return directory in ended or not directory.exists()


def _directory_in(line: str) -> Path:
    return Path(line.partition(MARK)[2].strip())
