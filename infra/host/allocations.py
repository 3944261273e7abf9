"""Slurm allocations, as the login node has them: what `gpu_leases` is on a host of one's own.

    <root>/<id>/allocation.json      the Slurm job's number, who asked for it, the jobs that it is for
    <root>/<id>/holders/<token>      touched by every run that uses it
    <root>/<id>/node-<k>.json        what its agent on node k has (see `allocation`)
    <root>/<id>/jobs-<k>.json        the jobs that this agent keeps
    <root>/<id>/begun                there once an agent has started in it
    <root>/gone-<token>              a run that wants nothing any more
    <root>/failed-<token>            why the allocation of a run ended before it began

Decision: a lease of GPUs is a Slurm job. Its script starts our agent on each of its nodes, and stages run below these
agents: one after the other, so a run waits in the queue once and not for every stage. Slurm says who gets what, for how
long, and ends all of it.

Decision: whether a job runs is asked of Slurm and of the agent that keeps it, and not of a lock. Locks on a file system
that nodes share may not be seen from the login node.

Decision: a job goes on for as long as its allocation does. While that waits for its turn again (preempted, at its time
limit, after a node's failure), the job counts as running, and its status says what it waits for.
"""

import json
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from infra.host import slurm
from infra.host.files import read_json, write_json
from infra.host.gpu_leases import GONE_SECONDS, HOLD_SECONDS, alone

FOLDER = "allocations"
NAME = "rollouts-"
"""How the Slurm jobs' names begin."""
STEP_SECONDS = 12.0
STEPS_SECONDS = 24.0
"""After a restart, Slurm's controller refuses steps for some seconds."""
GONE = re.compile("invalid job id|completing or completed|revoked|expired|not running", re.IGNORECASE)
"""Said of a step whose allocation ends."""
LIVE = ("RUNNING", "SUSPENDED")
NOBODYS_FAULT = ("NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "TIMEOUT")
"""Ends of an allocation behind which another one may do better."""
LAST_LINES = 10
SLOW_STATES = {"CONFIGURING": "its nodes are made ready", "SUSPENDED": "it is suspended", "COMPLETING": "it is ending"}


def acquire(root: Path, jobs: Path, ask: Mapping[str, Any]) -> dict[str, Any]:
    """An allocation for the run `token`: `lease`, `gpus`, `address`, `joined`; or why not yet (`waiting`), why never
    (`refused`), or how it ended before it began (`failed`).

    `ask` has `who`, for people, the `jobs` that the run is about to want, which `node` of the allocation is asked
    about, and in `slurm` what to submit (see `_script`). Where one of the jobs has an allocation, it is joined. Asking
    again is harmless.
    """
    with alone(root):
        queue = slurm.look(root)
        if (root / f"gone-{ask['token']}").exists():
            return {"waiting": "this run has ended"}
        living = _living(root, jobs, queue)
        failed = root / f"failed-{ask['token']}"
        if failed.exists():
            message = failed.read_text()
            failed.unlink()
            return {"failed": message}
        mine = [found for found in living if ask["token"] in found["holders"]]
        try:
            found = (mine or _joinable(living, ask) or [_submitted(root, ask)])[0]
        except slurm.Refused as error:
            return {"refused": str(error)}
        except slurm.Away as error:
            return {"waiting": f"Slurm does not answer: {error}"}
        if ask["node"] >= found["nodes"]:
            said = f"a job of this run is running in Slurm job {found['slurm']}, which has {found['nodes']} nodes"
            return {"refused": f"{said}; `rollouts cancel` ends it"}
        _hold(root / found["lease"], ask["token"], ask["who"])
        return _told(root, found, ask["node"], queue) | {"joined": not mine, "kept": None}


def renew(root: Path, lease: str, token: str) -> bool:
    """Say that the run still holds the allocation; False when it has ended."""
    holder = root / lease / "holders" / token
    if not holder.exists():
        return False
    os.utime(holder)
    return True


def release(root: Path, jobs: Path, token: str, for_good: bool) -> None:
    """Hold nothing any longer. An allocation with neither holders nor jobs is cancelled, waiting or not."""
    if not root.exists():
        return
    with alone(root):
        if for_good:
            (root / f"gone-{token}").touch()
        held = [holder.parents[1] for holder in root.glob(f"*/holders/{token}")]
        for directory in held:
            (directory / "holders" / token).unlink()
        for found in _living(root, jobs, slurm.look(root)):
            if root / found["lease"] in held and not found["holders"] and not found["running"]:
                with suppress(slurm.Away):  # its agent ends it
                    slurm.cancel(found["slurm"])
                slurm.forget(root)


def living(root: Path, jobs: Path) -> list[dict[str, Any]]:
    """All that wait or run, with the fields of `gpu_leases.living`; also `slurm`, the number, and `state`."""
    if not root.exists():
        return []
    with alone(root):
        return _living(root, jobs, slurm.look(root))


def start(root: Path, lease: str, node: int, request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Have the agent of a node start a job: its answer; None when the allocation has ended, or Slurm does not answer.

    The request goes over the standard input of a step of the allocation, so that no variable in it is written down.
    """
    directory = root / lease
    told, found = read_json(directory / f"node-{node}.json"), read_json(directory / "allocation.json")
    row = slurm.look(root).rows.get(found.get("slurm", ""))
    if not told or row is None or row.state not in LIVE:
        return None
    step = ["srun", f"--jobid={found['slurm']}", "--overlap", "--nodes=1", "--ntasks=1", "--quiet",
            f"--nodelist={told['node']}", *told["agent"], "begin", str(directory), str(node)]  # fmt: skip
    end = time.monotonic() + STEPS_SECONDS
    while True:
        answer = _step(step, json.dumps(request))
        if answer is None or "again" not in answer:
            return answer
        if time.monotonic() > end:
            slurm.forget(root)
            lapsed = slurm.AWAY.search(answer["again"])
            return None if lapsed else {"error": f"a step on {told['node']} failed: {answer['again']}"}
        time.sleep(1.0)


def _step(command: Sequence[str], given: str) -> dict[str, Any] | None:
    """The agent's answer, None when the allocation has ended; `again`: what Slurm said that may pass. A start may be
    asked for twice."""
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=STEP_SECONDS)
        answer: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"again": f"it did not start within {STEP_SECONDS:.0f} s"}
    except ValueError:
        said = done.stderr.strip() or done.stdout.strip()
        return None if GONE.search(said) else {"again": said}
    return answer


def poll(directory: Path) -> dict[str, Any] | None:
    """How a job is that an allocation keeps: None where it does not, and the job's directory says all."""
    keeper = _keeper(directory)
    if keeper is None:
        return None
    home, node, number = keeper
    queue = slurm.look(home.parent)
    row = queue.rows.get(number)
    if queue.away:
        return {"state": "running", "message": f"Slurm does not answer ({queue.away}); the job may run on"}
    if row is None:
        slurm.forget(home.parent)
        with alone(home.parent):
            _living(home.parent, directory.parent, slurm.look(home.parent))
        ending = {"state": "running", "message": f"Slurm job {number} is ending"}
        return ending if _keeper(directory) else None
    if row.state in LIVE and (home / "leaving").exists():
        return {"state": "running", "message": f"Slurm job {number} leaves its nodes, and is queued again"}
    if row.state in LIVE and (home / f"node-{node}.json").exists():
        return {"state": "running", "message": ""}
    return {"state": "running", "message": waits_for(number, row, queue)}


def drop(directory: Path) -> bool:
    """No longer keep a job whose allocation waits for its turn; False where an agent has it."""
    keeper = _keeper(directory)
    if keeper is None:
        return False
    home, node, number = keeper
    row = slurm.look(home.parent).rows.get(number)
    if row is None or row.state != "PENDING":
        return False
    names = read_json(home / f"jobs-{node}.json")
    names.pop(directory.name, None)
    write_json(directory / "status.json", {"exit_status": None, "reason": "cancelled", "ended_at": time.time()})
    write_json(home / f"jobs-{node}.json", names)
    return True


def kept_jobs(root: Path) -> list[str]:
    """The names of all jobs that allocations keep."""
    return sorted({name for directory in root.glob("*/") for name in _kept_in(directory)})


def waits_for(number: str, row: slurm.Row | None, queue: slurm.Queue) -> str:
    """For a person: what a Slurm job waits for, where it is in its queue, when it is expected to start."""
    if queue.away:
        return f"Slurm does not answer: {queue.away}"
    if row is None:
        return f"Slurm job {number} is submitted"
    if row.state in LIVE:
        return f"Slurm job {number} has begun on {row.nodes}: its agent starts"
    if row.state != "PENDING":
        return f"Slurm job {number}: {SLOW_STATES.get(row.state, row.state.lower())}"
    place, of = slurm.place_in_line(number, row.partition)
    line = f", {place} of {of} in the queue of {row.partition}" if place else ""
    reason = "" if row.reason == "None" else f": {row.reason}"
    return f"Slurm job {number} waits{reason}{line}{_expected(row.start)}"


def _keeper(directory: Path) -> tuple[Path, int, str] | None:
    """The allocation that keeps a job: its directory, the node, its number in Slurm."""
    kept = read_json(directory / "allocation")
    if not kept:
        return None
    home = directory.parents[2] / FOLDER / kept["lease"]
    if directory.name not in read_json(home / f"jobs-{kept['node']}.json"):
        return None
    return home, kept["node"], read_json(home / "allocation.json").get("slurm", "")


def _expected(start: str) -> str:
    """Coarser the longer it takes, so that a line is not told anew every minute."""
    try:
        seconds = time.mktime(time.strptime(start, "%Y-%m-%dT%H:%M:%S")) - time.time()
    except ValueError:
        return ""
    if seconds < 60:
        return ", within a minute"
    minutes = seconds / 60
    if minutes < 90:
        return f", in about {max(5, 5 * round(minutes / 5)):.0f} min" if minutes >= 3 else ", within five minutes"
    return f", in about {minutes / 60:.0f} hours"


def _joinable(living: Sequence[dict[str, Any]], ask: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those of the same jobs, where one of them runs or would be as good. Otherwise, what a run that has ended has left
    of another shape is given back. Raises `slurm.Away`."""
    shared = [found for found in living if set(found["jobs"]) & set(ask["jobs"])]
    asked = {"nodes": ask["slurm"]["nodes"], "asked": " ".join(ask["slurm"]["options"])}
    fitting = [found for found in shared if found["running"] or asked.items() <= found.items()]
    left = [] if fitting else [found for found in shared if not found["holders"]]
    for found in left:
        slurm.cancel(found["slurm"])
    return fitting


def _told(root: Path, found: Mapping[str, Any], number: int, queue: slurm.Queue) -> dict[str, Any]:
    """What a node of an allocation has; or that it is waited for, or never comes. Raises `slurm.Away`."""
    directory = root / found["lease"]
    row = queue.rows.get(found["slurm"])
    if row is not None and row.reason in slurm.NEVER:
        slurm.cancel(found["slurm"])
        shutil.rmtree(directory, ignore_errors=True)
        return {"refused": f"it would wait for ever: {row.reason} ({found['asked']})"}
    nodes = [read_json(directory / f"node-{place}.json") for place in range(found["nodes"])]
    if all(nodes) and (row is None or row.state not in LIVE):  # it has begun since the queue was looked at
        slurm.forget(root)
        row = slurm.look(root).rows.get(found["slurm"])
    if row is None or row.state not in LIVE or not all(nodes):
        return {"waiting": waits_for(found["slurm"], row, queue)}
    told = {name: nodes[number][name] for name in ("gpus", "address", "host_key")}
    return {**told, "lease": found["lease"]}


def _submitted(root: Path, ask: Mapping[str, Any]) -> dict[str, Any]:
    """Raises `slurm.Refused` or `slurm.Away`; then nothing is left."""
    lease = secrets.token_hex(4)
    directory = root / lease
    (directory / "holders").mkdir(parents=True, mode=0o700)
    asked = ask["slurm"]
    try:
        limit = slurm.longest(asked["partition"])
        minutes = asked["minutes"] if limit is None else min(asked["minutes"], limit)
        options = [
            f"--job-name={NAME}{lease}", f"--time={minutes}", f"--nodes={asked['nodes']}", "--ntasks-per-node=1",
            f"--output={directory}/log", "--open-mode=append", "--requeue", f"--signal=B:USR1@{asked['signal']}",
            f"--chdir={directory}", *asked["options"],
        ]  # fmt: skip
        number = slurm.submit(_script(asked, directory), options)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    found = {
        "slurm": number, "who": ask["who"], "jobs": sorted(ask["jobs"]), "since": time.time(), "nodes": asked["nodes"],
        "signal": asked["signal"], "asked": " ".join(asked["options"]),
    }  # fmt: skip
    write_json(directory / "allocation.json", found)
    slurm.forget(root)
    return {**found, "lease": lease}


def _script(asked: Mapping[str, Any], directory: Path) -> str:
    """What Slurm keeps of the job, and shows to others: no variable and no secret is in it."""
    modules = [f"module load {module} || exit 1" for module in asked["modules"]]
    command = " ".join(f"'{part}'" for part in [*asked["agent"], "allocation", str(directory), "0"])
    return "\n".join(["#!/bin/bash -l", *modules, f"exec {command}", ""])


def _living(root: Path, jobs: Path, queue: slurm.Queue) -> list[dict[str, Any]]:
    found, now = [], _now(root)
    for gone in (*root.glob("gone-*"), *root.glob("failed-*")):
        if now - gone.stat().st_mtime > GONE_SECONDS:
            gone.unlink()
    for directory in sorted(path for path in root.iterdir() if path.is_dir()):
        told = read_json(directory / "allocation.json")
        row = queue.rows.get(told.get("slurm", ""))
        ended = _end_of(told["slurm"]) if told and row is None and not queue.away else None
        if ended is not None:
            _bury(directory, jobs, f"Slurm job {told['slurm']}", ended)
            continue
        if not told:  # its submission was killed, or is under way: then this lock is held by it
            shutil.rmtree(directory, ignore_errors=True)
            continue
        running = _kept_in(directory)
        holders = sorted(
            holder.name for holder in (directory / "holders").glob("*")
            if now - holder.stat().st_mtime < HOLD_SECONDS
        )  # fmt: skip
        gpus = sorted({gpu for file in directory.glob("node-*.json") for gpu in read_json(file).get("gpus", [])})
        found.append({
            "lease": directory.name, "gpus": gpus, "who": told["who"], "since": told["since"], "running": running,
            "jobs": sorted({*told["jobs"], *running}), "holders": holders, "kept": None, "slurm": told["slurm"],
            "asked": told["asked"], "nodes": told["nodes"], "state": row.state.lower() if row else "submitted",
        })  # fmt: skip
    return found


def _now(root: Path) -> float:
    """By the clock of whoever keeps the files, which gives them their times."""
    os.utime(root / "lock")
    return (root / "lock").stat().st_mtime


def _end_of(number: str) -> str | None:
    """How a job ended, empty where Slurm has forgotten it; None where it goes on. One that was submitted a moment ago
    may not be in the queue yet."""
    try:
        state = slurm.how_it_ended(number)
    except slurm.Away:
        return None
    return None if state in ("PENDING", "CONFIGURING", "COMPLETING", *LIVE) else state


def _bury(directory: Path, jobs: Path, name: str, state: str) -> None:
    """Say in the directories of the jobs that ended with their allocation how that was, and to the runs that waited for
    one that has not begun."""
    how = state or "Slurm no longer knows why"
    if state not in NOBODYS_FAULT and not (directory / "begun").exists():
        message = "\n    ".join([f"{name} ended before its agent began ({how})", *_last_lines(directory / "log")])
        for holder in (directory / "holders").glob("*"):
            (directory.parent / f"failed-{holder.name}").write_text(message)
    for job in {jobs / kept for kept in _kept_in(directory)}:
        if (job / "status.json").exists():
            continue
        write_json(job / "failure.json", {"message": f"{name} was ended: {how}"})
        if state == "CANCELLED":
            status = {"exit_status": None, "reason": "its Slurm job was cancelled", "ended_at": time.time()}
            write_json(job / "status.json", status)
    shutil.rmtree(directory, ignore_errors=True)


def _kept_in(directory: Path) -> list[str]:
    """The jobs of all its nodes."""
    return sorted({name for file in directory.glob("jobs-*.json") for name in read_json(file)})


def _last_lines(log: Path) -> list[str]:
    try:
        return log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    except OSError:
        return []


def _hold(directory: Path, token: str, who: str) -> None:
    (directory / "holders" / token).write_text(who)
