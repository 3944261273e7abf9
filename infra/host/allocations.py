"""Slurm allocations on the login node. They are for a cluster what `gpu_leases` are for a single host.

    <root>/<id>/allocation.json      the Slurm job's number, who asked for it, the jobs that it is for
    <root>/<id>/holders/<token>      touched by every run that uses it
    <root>/<id>/node-<k>.json        what its agent on node k has (see `allocation`)
    <root>/<id>/jobs-<k>.json        the jobs that this agent keeps
    <root>/<id>/begun                there once an agent has started in it; how often Slurm had queued it again then
    <root>/gone-<token>              a run that wants nothing any more
    <root>/failed-<token>            why the allocation of a run ended before it began

Decision: a lease of GPUs is a Slurm job. Its script starts our agent on each of its nodes, and stages run as children
of these agents, one after the other. So a run waits in the queue once and not for every stage. Slurm decides who gets
what, for how long, and ends all of it.

Nodes that are asked for with other options than the first are a component of their own: a heterogeneous job. Their
numbers go on where those of the component before end.

Decision: many similar jobs are a job array, and each element of it is an allocation of its own, which keeps one job
from the start (`submit_array`). Nothing else is different: it may be preempted, queued again and followed as any other.
"""

import os
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from infra.host import allocated, mounting, slurm
from infra.host.allocated import LIVE, waits_for
from infra.host.files import read_json, write_json
from infra.host.gpu_leases import alone


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
        there = [found for found in allocated.living(root, jobs, queue) if not found["array"]]
        failed = root / f"failed-{ask['token']}"
        if failed.exists():
            message = failed.read_text()
            failed.unlink()
            return {"failed": message}
        mine = [found for found in there if ask["token"] in found["holders"]]
        try:
            found = (mine or _joinable(there, ask) or [_submitted(root, ask)])[0]
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
    for directory in root.glob("*/"):
        _bring_key(directory)
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
        there = allocated.living(root, jobs, slurm.look(root))
        ended = [found for found in there if root / found["lease"] in held and not found["holders"] + found["running"]]
        for found in ended:
            with suppress(slurm.Away):  # its agent ends it
                slurm.cancel(found["slurm"])
            slurm.forget(root)
    mounting.dismiss([root / found["lease"] for found in ended])


def living(root: Path, jobs: Path) -> list[dict[str, Any]]:
    """The same as `allocated.living`."""
    if not root.exists():
        return []
    with alone(root):
        return allocated.living(root, jobs, slurm.look(root))


def _joinable(there: Sequence[dict[str, Any]], ask: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Allocations of the same jobs that run or would do as well. Otherwise, what a run that has ended has left
    of another shape is given back. Raises `slurm.Away`."""
    shared = [found for found in there if set(found["jobs"]) & set(ask["jobs"])]
    fitting = [found for found in shared if found["running"] or found["asked"] == _asked(ask["slurm"])]
    left = [] if fitting else [found for found in shared if not found["holders"]]
    for found in left:
        slurm.cancel(found["slurm"])
    return fitting


def _told(root: Path, found: Mapping[str, Any], number: int, queue: slurm.Queue) -> dict[str, Any]:
    """The resources of an allocation's node, or that it is waited for, or that it never comes. Raises `slurm.Away`."""
    directory = root / found["lease"]
    row = queue.rows.get(found["slurm"])
    if row is not None and row.reason in slurm.NEVER:
        slurm.cancel(found["slurm"])
        shutil.rmtree(directory, ignore_errors=True)
        return {"refused": f"it would wait for ever: {row.reason} ({found['asked']})"}
    _bring_key(directory)
    nodes = [read_json(directory / f"node-{place}.json") for place in range(found["nodes"])]
    if all(nodes) and (row is None or row.state not in LIVE):  # it has begun since the last look at the queue
        slurm.forget(root)
        row = slurm.look(root).rows.get(found["slurm"])
    if row is None or row.state not in LIVE or not all(nodes):
        return {"waiting": waits_for(found["slurm"], row, queue)}
    told = {name: nodes[number][name] for name in ("gpus", "address", "host_key")}
    return {**told, "lease": found["lease"]}


def _bring_key(directory: Path) -> None:
    """Bring the key to a node that does not see this directory, and that waits for the key to mount it."""
    told = read_json(directory / "allocation.json")
    row = slurm.look(directory.parent).rows.get(told.get("slurm", "")) if told.get("mount") else None
    if row is not None and row.state in LIVE:
        mounting.bring(directory, told)


def _submitted(root: Path, ask: Mapping[str, Any]) -> dict[str, Any]:
    """Raises `slurm.Refused` or `slurm.Away`; then nothing is left."""
    lease, asked = secrets.token_hex(4), ask["slurm"]
    directory = root / lease
    told = _description(ask, sorted(ask["jobs"]), [component["nodes"] for component in asked["components"]])
    first, *others = [_options(lease, asked, component) for component in asked["components"]]
    options = [*_places(asked, str(directory), str(directory)), *first]
    for component in others:
        options += [":", *component]
    try:
        _write_description(directory, told)
        told["slurm"] = slurm.submit(_script(asked, str(directory)), options)
        write_json(directory / "allocation.json", told)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    slurm.forget(root)
    return {**told, "lease": lease, "nodes": sum(told["components"])}


def submit_array(root: Path, names: Sequence[str], ask: Mapping[str, Any]) -> str:
    """An allocation for each of the named jobs, whose directories say what they are (`jobs.prepare`): the array's
    number. `ask` has `who`, the jobs' plain `variables`, how many may run `at_once` (0: all), and `slurm`, as in
    `acquire`.

    Raises `slurm.Refused` or `slurm.Away`; then nothing is left.
    """
    lease, asked = secrets.token_hex(4), ask["slurm"]
    homes = [root / f"{lease}.{place}" for place in range(len(names))]
    (component,) = asked["components"]
    limit = f"%{ask['at_once']}" if ask["at_once"] else ""
    options = [f"--array=0-{len(names) - 1}{limit}", *_places(asked, f"{root}/{lease}.%a", str(root)),
               *_options(lease, asked, component)]  # fmt: skip
    with alone(root):
        try:
            for name, home in zip(names, homes, strict=True):
                _write_description(home, _description(ask, [name], [1], array=True))
                write_json(home / "jobs-0.json", {name: {"variables": dict(ask["variables"]), "secret": False}})
                write_json(root.parent / "store" / "jobs" / name / "allocation", {"lease": home.name, "node": 0})
            number = slurm.submit(_script(asked, f"{root}/{lease}.$SLURM_ARRAY_TASK_ID"), options)
            for place, (name, home) in enumerate(zip(names, homes, strict=True)):
                told = _description(ask, [name], [1], array=True)
                write_json(home / "allocation.json", {**told, "slurm": f"{number}_{place}"})
        except BaseException:
            for home in homes:
                shutil.rmtree(home, ignore_errors=True)
            raise
        slurm.forget(root)
    return number


def _description(ask: Mapping[str, Any], jobs: list[str], components: list[int], array: bool = False) -> dict[str, Any]:
    """The description of an allocation, for agents and the login node. Its number is added when it is submitted."""
    return {
        "slurm": "", "who": ask["who"], "jobs": jobs, "since": time.time(), "components": components,
        "signal": ask["slurm"]["signal"], "asked": _asked(ask["slurm"]), "array": array,
        "local_disk": ask["slurm"]["local_disk"], "mount": ask["slurm"]["mount"], "minutes": ask["slurm"]["minutes"],
        "python": ask["slurm"]["agent"][0],
    }  # fmt: skip


def _write_description(directory: Path, told: Mapping[str, Any]) -> None:
    """Write the description. This must come before the submission, since the agent reads it."""
    (directory / "holders").mkdir(parents=True, mode=0o700)
    write_json(directory / "allocation.json", told)


def _asked(asked: Mapping[str, Any]) -> str:
    return " : ".join(" ".join([f"--nodes={part['nodes']}", *part["options"]]) for part in asked["components"])


def _places(asked: Mapping[str, Any], log: str, directory: str) -> list[str]:
    """The files where a node writes what its agent prints, and begins."""
    if asked["mount"]:
        return ["--output=/dev/null", "--chdir=/"]
    return [f"--output={log}/log", f"--chdir={directory}"]


def _options(lease: str, asked: Mapping[str, Any], component: Mapping[str, Any]) -> list[str]:
    limit = slurm.longest(asked["partition"])
    minutes = asked["minutes"] if limit is None else min(asked["minutes"], limit)
    return [
        f"--job-name={slurm.NAME}{lease}", f"--time={minutes}", f"--nodes={component['nodes']}", "--ntasks-per-node=1",
        "--open-mode=append", "--requeue", f"--signal=B:USR1@{asked['signal']}", *component["options"],
    ]  # fmt: skip


def _script(asked: Mapping[str, Any], directory: str) -> str:
    """The script of the job. Slurm stores it and shows it to other users, so it has no variables and no secrets."""
    modules = [f"module load {module} || exit 1" for module in asked["modules"]]
    if asked["mount"]:
        return mounting.script(asked["agent"][0], Path(asked["agent"][1]), directory, modules)
    command = " ".join(f"'{part}'" for part in [*asked["agent"], "allocation"])
    return "\n".join(["#!/bin/bash -l", *modules, f'exec {command} "{directory}" 0', ""])


def _hold(directory: Path, token: str, who: str) -> None:
    (directory / "holders" / token).write_text(who)
