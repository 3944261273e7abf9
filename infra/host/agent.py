"""A host's end of the connection: answers requests over standard input and output.

    serve WORK              requests, one after another, until the connection ends
    receive WORK INCOMING   frames of a tree, over standard input
    send WORK PLACE         the frames that standard input asks for
    runner DIRECTORY [FD]   watches over one job (see `runner`)
    environment DIRECTORY   builds an environment (see `environment`)
    allocation DIRECTORY K  keeps jobs in a Slurm allocation, on its node K (see `allocation`)
    mounted DIRECTORY K     the same, on a node that does not see WORK (see `mounting`)
    begin DIRECTORY K       hands it the request on standard input (see `node_socket`)
    servers DIRECTORY       keeps inference servers alive (see `servers`)
    pool DIRECTORY          a trainer's way to servers on other machines (see `pool`)

A request is a length and JSON, `{"call": ..., "arguments": {...}}`; the answer `{"value": ...}` or
`{"error": kind, "message": ...}`. Every call may be made twice: an answer that was lost is asked for again.

Layout below WORK, which is this user's alone:

    agent/, code/, environments/, wheels/, inputs/   what was sent or built, by digest
    incoming/                                        what is being sent
    leases/, allocations/                            who has which GPU
    runs/                                            which artifacts each run needs
    store/                                           artifacts, jobs and partial work (see rollouts_core.store)
    alive                                            touched while something here is wanted or runs

Decision: the agent lives as long as its connection and keeps nothing in memory. Jobs are not its children.
"""

import base64
import errno
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from infra.host import (
    admission,
    allocated,
    allocation,
    allocations,
    cluster,
    collect,
    environment,
    gpu_leases,
    jobs,
    keeping,
    mounting,
    node_socket,
    pool,
    runner,
    servers,
    slurm,
    steps,
    trees,
)
from infra.host.checksums import SECONDS, checksums_here
from infra.host.facts import facts, gpu_use, gpus, visible
from rollouts_core.store.flush import flush
from rollouts_core.store.locks import born

IDLE_SECONDS = 120.0
IMPORT_SECONDS = 280.0
PROBE_SECONDS = 60
MAX_REQUEST = 256 * 2**20
LENGTH = struct.Struct(">I")
DRAINED = "drained"
"""A file in WORK."""
SHELVES = {"artifacts": "store/artifacts", "code": "code", "inputs": "inputs", "wheels": "wheels"}


def main(arguments: list[str]) -> int:
    os.umask(0o077)
    command, place = arguments[0], arguments[1]
    if command == "runner":
        return runner.main(place, *map(int, arguments[2:]))
    if command == "allocation":
        return allocation.main(Path(place), allocation.node_number(arguments[2]))
    if command == "mounted":
        return mounting.main(Path(place), arguments[2])
    if command == "begin":
        return node_socket.begin(Path(place), int(arguments[2]))
    if command == "environment":
        return environment.main(Path(place))
    if command == "servers":
        return servers.main(Path(place))
    if command == "pool":
        return pool.main(Path(place))
    if command == "serve":
        return serve(Path(place))
    try:
        if command == "receive":
            entries = json.loads((Path(place) / arguments[2] / "entries.json").read_text())
            trees.receive(Path(place) / arguments[2], entries, _read_or_end)
            print(json.dumps({"value": True}))
        elif command == "send":
            _send(Path(place) / arguments[2])
    except (OSError, trees.BadTree, EOFError) as error:
        print(json.dumps(_error(error)), file=sys.stderr if command == "send" else sys.stdout)
        return 1
    return 0


def serve(work: Path) -> int:
    """Answer until the other side is gone, or silent for `IDLE_SECONDS`."""
    while (content := _request()) is not None:
        try:
            request = json.loads(content)
            answer: dict[str, Any] = {"value": CALLS[request["call"]](work, **request["arguments"])}
            data = json.dumps(answer).encode()
        except (OSError, subprocess.SubprocessError, jobs.JobError, trees.BadTree, slurm.Away, slurm.Refused) as error:
            data = json.dumps(_error(error)).encode()
        except Exception as error:  # answer anyway: an agent that ends looks like a machine that is away
            data = json.dumps(_fault(error)).encode()
        _write(LENGTH.pack(len(data)) + data)
    return 0


def start(work: Path, job: Mapping[str, Any], variables: Mapping[str, str], lease: str | None, token: str) -> bool:
    """Start a job on a lease; False when the lease has lapsed."""
    if lease is not None and not gpu_leases.use(work / "leases", _name(lease), _name(token), _name(job["name"])):
        return False
    if leased := variables.get("CUDA_VISIBLE_DEVICES"):
        named = visible(map(int, leased.split(",")), gpus())
        variables = {**variables, "CUDA_VISIBLE_DEVICES": named}
    jobs.start(work / "store" / "jobs", {**job, "name": _name(job["name"])}, jobs.runner_command(), variables)
    return True


def start_allocated(
    work: Path, job: Mapping[str, Any], variables: Mapping[str, str], secret: list[str], lease: str, node: int
) -> bool:
    """Start a job in a Slurm allocation; False when that has ended. `secret`: the variables that nobody may keep."""
    request = {"job": {**job, "name": _name(job["name"])}, "variables": variables, "secret": secret}
    answer = steps.start(work / allocated.FOLDER, _name(lease), node, request)
    if answer and "error" in answer:
        raise jobs.JobError(answer["error"])
    return answer is not None


def start_array(
    work: Path,
    wanted: list[dict[str, Any]],
    variables: Mapping[str, str],
    who: str,
    at_once: int,
    asked: dict[str, Any],
) -> dict[str, str]:
    """Submit as one array those of the jobs that do not run: `refused` or `waiting` says why not, in Slurm's words."""
    place = work / "store" / "jobs"
    todo = [job for job in wanted if jobs.poll(place, _name(job["name"]))["state"] != "running"]
    for job in todo:
        jobs.prepare(place, job)
    ask = {"who": who, "variables": variables, "at_once": at_once, "slurm": asked}
    try:
        number = allocations.submit_array(work / allocated.FOLDER, [job["name"] for job in todo], ask) if todo else ""
    except slurm.Refused as error:
        return {"refused": str(error)}
    except slurm.Away as error:
        return {"waiting": f"Slurm does not answer: {error}"}
    return {"slurm": number}


def checksums(work: Path, job: str) -> list[dict[str, Any]]:
    """The same as `checksums_here`, on the node where the job is."""
    keeper = allocated.keeper_of(work / "store" / "jobs" / _name(job))
    if keeper is None:
        return checksums_here(work / "store" / "jobs", job)
    home, node, _ = keeper
    found: list[dict[str, Any]] = steps.ask(home.parent, home.name, node, "checksums_here", SECONDS, job=job)
    return found


def watch(work: Path, job: str, log: int, metrics: int, wait: float) -> dict[str, Any]:
    status, lines, values = jobs.watch(work / "store" / "jobs", _name(job), log, metrics, wait)
    return {"status": status, "log": base64.b64encode(lines).decode(), "metrics": base64.b64encode(values).decode()}


def offer(work: Path, shelf: str, name: str, entries: list[trees.Entry]) -> dict[str, Any]:
    """`there`, or what is `missing` and where it is to go (`incoming`, below WORK)."""
    if (work / SHELVES[shelf] / _name(name)).exists() and (shelf != "artifacts" or artifact(work, name)):
        return {"there": True}
    incoming = f"incoming/{shelf}-{name}-{trees.tree_name(entries)}"
    known = _known(work) if shelf == "artifacts" else {}
    return {"there": False, "incoming": incoming, "missing": trees.begin(work / incoming, entries, known)}


def settle(work: Path, shelf: str, name: str, entries: list[trees.Entry], manifest: str | None) -> list[str]:
    """Verify what came and move it into place; the names of damaged files, of which there should be none."""
    incoming = work / "incoming" / f"{shelf}-{_name(name)}-{trees.tree_name(entries)}"
    target = work / SHELVES[shelf] / name
    if not incoming.exists():
        return []
    if damaged := trees.finish(incoming, entries):
        return damaged
    for path, _, _ in entries:
        os.chmod(f"{incoming}/files/{path}", 0o444)
    if manifest is None:
        settled = incoming / "files"
    else:
        settled = incoming
        (incoming / "manifest.json").write_text(manifest)
        (incoming / "manifest.json").chmod(0o444)
    flush(chain([settled], settled.rglob("*")))
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if target.exists() and shelf == "artifacts" and not artifact(work, name):
        target.rename(work / "incoming" / f"damaged-{name}-{os.getpid()}")
    try:
        settled.rename(target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
    shutil.rmtree(incoming, ignore_errors=True)
    return []


def artifact(work: Path, name: str) -> str | None:
    """The manifest of an artifact that is here with every file in its size."""
    home = work / SHELVES["artifacts"] / _name(name)
    try:
        manifest = (home / "manifest.json").read_text()
        files = json.loads(manifest)["files"]
        whole = all((home / "files" / file["path"]).stat().st_size == file["size"] for file in files)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest if whole else None


def artifacts(work: Path, names: list[str]) -> list[str]:
    """The named artifacts that are on this host."""
    return [name for name in names if artifact(work, name)]


def discard(work: Path, names: list[str]) -> None:
    """Remove artifacts, and partial work on them."""
    for name in names:
        doomed = [work / SHELVES["artifacts"] / _name(name), *(work / "store" / "work").glob(f"{name}.*")]
        for directory in doomed:
            if directory.exists():
                aside = work / "incoming" / f"discarded-{name}-{os.getpid()}"
                aside.parent.mkdir(parents=True, exist_ok=True)
                directory.rename(aside)
                shutil.rmtree(aside, ignore_errors=True)


def built(work: Path, key: str) -> dict[str, Any] | None:
    """The description of a Python environment; None if it does not exist."""
    try:
        found: dict[str, Any] = json.loads((work / "environments" / _name(key) / environment.NAME).read_text())
    except (OSError, ValueError):
        return None
    return found


def versions(work: Path, python: str) -> dict[str, str]:
    """Distributions and their versions, as an interpreter has them."""
    found: dict[str, str] = _printed(python, environment.VERSIONS)
    return found


def imports(work: Path, python: str, check: str) -> dict[str, Any]:
    """The output of an interpreter that imports the packages of jobs."""
    found: dict[str, Any] = _printed(python, check)
    return found


def busy(work: Path) -> dict[str, Any]:
    """Jobs that run, leases, and of the jobs that keep servers how many answer."""
    store_jobs = work / "store" / "jobs"
    running = jobs.running(store_jobs)
    answering = {name: told for name in running if (told := servers.answering(store_jobs / name))}
    leases = gpu_leases.living(work / "leases", store_jobs) + allocations.living(work / allocated.FOLDER, store_jobs)
    return {"jobs": running, "leases": leases, "servers": answering}


def leave_behind(work: Path) -> dict[str, Any]:
    """Start a process as detached as a job is, which ends by itself: its `pid`, and when it was `born`."""
    process = subprocess.Popen(
        ["sleep", str(PROBE_SECONDS)], start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return {"pid": process.pid, "born": born(process.pid)}


def lives(work: Path, pid: int, born_at: str) -> bool:
    """Whether a process that was left behind is still there; it is ended."""
    if born(pid) != born_at:
        return False
    os.kill(pid, signal.SIGKILL)
    return True


def hand(work: Path, job: str, name: str, content: str) -> None:
    """Write a file that a job there reads."""
    jobs.hand(work / "store" / "jobs", _name(job), _name(name), content)


def cancel(work: Path, job: str, asked_by: str | None = None) -> bool:
    was_there = jobs.cancel(work / "store" / "jobs", _name(job), asked_by)
    admission.sweep()
    return was_there


def drain(work: Path, who: str, undo: bool) -> list[dict[str, Any]]:
    """Lease nothing here any more, and have servers leave; or `undo` that. Gives the leases there are."""
    if undo:
        (work / DRAINED).unlink(missing_ok=True)
    else:
        (work / DRAINED).write_text(json.dumps({"who": who, "since": time.time()}))
    return gpu_leases.living(work / "leases", work / "store" / "jobs")


def drained(work: Path) -> dict[str, Any] | None:
    """The user who drained the machine, and since when; None if it is not drained."""
    try:
        found: dict[str, Any] = json.loads((work / DRAINED).read_text())
    except (OSError, ValueError):
        return None
    return found


def acquire(work: Path, ask: dict[str, Any]) -> dict[str, Any]:
    _name(ask["token"])
    if told := drained(work):
        return {"busy": [], "drained": told["who"]}
    if "slurm" in ask:
        return allocations.acquire(work / allocated.FOLDER, work / "store" / "jobs", ask)
    return gpu_leases.acquire(work / "leases", work / "store" / "jobs", ask)


def take_over(work: Path, old: str, job: str, lease: str, token: str, who: str) -> bool:
    """Take over servers that are kept on a lease, as the job `job`. False if they or the lease are gone."""
    if not gpu_leases.renew(work / "leases", _name(lease), _name(token)):
        return False
    if not keeping.take_over(work / "store" / "jobs", _name(old), _name(job)):
        return False
    return gpu_leases.pass_on(work / "leases", lease, token, who, job)


def renew(work: Path, lease: str | None, token: str) -> bool:
    """Renew a lease. This also keeps the agent and a rented host from ending because they are idle."""
    (work / "alive").touch()
    if lease is not None and (work / allocated.FOLDER / _name(lease)).exists():
        return allocations.renew(work / allocated.FOLDER, lease, _name(token))
    return lease is None or gpu_leases.renew(work / "leases", _name(lease), _name(token))


def release(work: Path, token: str, for_good: bool) -> None:
    gpu_leases.release(work / "leases", work / "store" / "jobs", _name(token), for_good)
    allocations.release(work / allocated.FOLDER, work / "store" / "jobs", token, for_good)


CALLS: dict[str, Callable[..., Any]] = {
    "facts": facts,
    "gpu_use": lambda work: gpu_use(),
    "start": start,
    "start_allocated": start_allocated,
    "start_array": start_array,
    "watch": watch,
    "attempt": lambda work, job: jobs.attempt(work / "store" / "jobs", _name(job)),
    "cancel": cancel,
    "hand": hand,
    "drain": drain,
    "drained": drained,
    "busy": busy,
    "note_run": lambda work, run, **told: collect.note_run(work, _name(run), **told),
    "noted_runs": collect.noted_runs,
    "collect": collect.collect,
    "leave_behind": leave_behind,
    "lives": lives,
    "cluster": cluster.cluster,
    "checksums": checksums,
    "checksums_here": lambda work, job: checksums_here(work / "store" / "jobs", _name(job)),
    "place": lambda work, job: keeping.place(work / "store" / "jobs", _name(job)),
    "keep": lambda work, job, **told: keeping.keep(work / "store" / "jobs", _name(job), **told),
    "take_over": take_over,
    "acquire": acquire,
    "renew": renew,
    "release": release,
    "artifact": artifact,
    "artifacts": artifacts,
    "discard": discard,
    "built": built,
    "versions": versions,
    "imports": imports,
    "offer": offer,
    "settle": settle,
}


def _send(place: Path) -> None:
    """Standard input names the files and the stretches that are wanted."""
    wanted = json.loads(sys.stdin.buffer.read())
    trees.refuse_bad_names(wanted["entries"])
    for piece in trees.frames(place, wanted["entries"], wanted["stretches"]):
        _write(piece)


def _printed(python: str, code: str) -> Any:
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=IMPORT_SECONDS)
    if done.returncode:
        lines = "\n".join(done.stderr.splitlines()[-5:])
        raise jobs.JobError(f"{python} can't import what jobs need:\n{lines}")
    return json.loads(done.stdout)


def _known(work: Path) -> dict[str, Path]:
    """The files of the artifacts on this host, by digest."""
    known: dict[str, Path] = {}
    for manifest in (work / SHELVES["artifacts"]).glob("*/manifest.json"):
        try:
            files = json.loads(manifest.read_text())["files"]
            known |= {file["sha256"]: manifest.parent / "files" / file["path"] for file in files if file["size"] > 4096}
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return known


def _name(name: str) -> str:
    """Refuses what is not a plain name, before it becomes part of a path."""
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise trees.BadTree(f"{name!r} is not a valid name")
    return name


def _error(error: Exception) -> dict[str, Any]:
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    where = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
    text = f"{error.strerror}{where}" if isinstance(error, OSError) else str(error)
    return {"error": "disk full" if full else "failed", "message": text}


def _fault(error: Exception) -> dict[str, Any]:
    """The answer to a request that can't be understood, or to a mistake of this program. It names the place in the
    code."""
    places = [
        f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    return {"error": "failed", "message": f"its agent failed in {places[-1]}: {type(error).__name__}: {error}"}


def _request() -> bytes | None:
    header = _exactly(LENGTH.size)
    if header is None:
        return None
    (length,) = LENGTH.unpack(header)
    if length > MAX_REQUEST:
        return None
    return _exactly(length)


def _exactly(count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = _read_or_end(count - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _read_or_end(count: int) -> bytes:
    """The bytes that have come, at most `count`; none if the other side is gone or has been silent for too long."""
    ready, _, _ = select.select([0], [], [], IDLE_SECONDS)
    return os.read(0, count) if ready else b""


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]
