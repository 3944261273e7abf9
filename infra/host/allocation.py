"""Our agent in a Slurm allocation: `allocation DIRECTORY NODE`, one on each of its nodes.

The one on node 0 is the allocation's script; it starts the others by srun, ends when nobody wants the allocation any
more, and has Slurm queue it again when its time is over before its jobs are. That of an array's element ends with its
job. The directory's files are described in `allocations`.

Decision: jobs are this process's children, so Slurm accounts for them, limits them, and ends them with the allocation.
They are started by requests over a socket of this node (`node_socket`). Their secret variables are in the memory of
runner and job alone. So a job with such variables can't be started again by this agent: it ends, and the run that
follows it starts it anew.

Decision: before the time limit (`--signal`), jobs are asked to write a checkpoint and leave. When Slurm takes the nodes
away at once, they go on from the checkpoint before. Both give the same bits.

Decision: a node that Slurm has lost may keep running while its allocation begins again elsewhere. So each beginning
writes down how often the allocation was queued again (`begun`). An agent that reads a higher number than its own ends
its jobs and itself.
"""

import ctypes
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from infra.host import compute_node, jobs, local_disk, node_socket, slurm
from infra.host.files import read_json, write_json
from infra.host.runner import end_children
from rollouts_core.store.locks import is_held

TICK = 0.25
LOOK_SECONDS = 2.0
FIRST_SECONDS = 900.0
"""How long an allocation waits for its first job: the run that asked for it builds an environment meanwhile."""
IDLE_SECONDS = 60.0
"""And how long afterwards, without a job and without a run that holds it."""
LOST_SECONDS = 2.0
"""Between the end of a job that was killed and saying so: when Slurm ends everything, its signal may be on the way."""
LEFT_MARGIN = 10.0
FENCED_SECONDS = 10.0
"""How long a job may still run on a node that Slurm has lost, before it is started here."""
TAKEN_SECONDS = 900.0
"""How long to wait, behind Slurm's signal that it takes the nodes, for it to do so."""
SERVERS = "serve-"
"""How the jobs of servers are called, which have nothing to keep and do not leave by themselves."""
PR_SET_CHILD_SUBREAPER = 36
ADDRESS = "ROLLOUTS_GROUP_ADDRESS"
"""The variable that `rollouts_core.stages.ranks` reads."""
LOCAL_DISK = "ROLLOUTS_LOCAL_DISK"
"""The variable that `rollouts_core.stages.workspace` reads."""


@dataclass
class Agent:
    """The state of an agent of an allocation."""

    directory: Path
    node: int
    told: Mapping[str, Any]
    """The content of the allocation's file (see `allocations`)."""
    kept: dict[str, Any] = field(default_factory=dict)
    """The jobs that run or go on, by name: their variables, and whether there are secret ones."""
    gone_since: dict[str, float] = field(default_factory=dict)
    leaving: str = ""
    """Why the jobs must leave: the time is over (time), or Slurm takes the nodes (taken); empty if they may stay."""
    seen: dict[str, float] = field(default_factory=dict)
    """The time at which each holder's file was last touched, by the clock of the machine that touched it."""
    heard: float = field(default_factory=time.monotonic)
    """When a run was last heard of, or a job last ran, by the clock here."""
    had_jobs: bool = False
    looked: float = -math.inf
    """When the directory was last looked at, which may be on another machine's disk."""
    written: Mapping[str, Any] | None = None
    """The jobs that are on the disk as kept."""
    turn: int = field(default_factory=lambda: int(os.environ.get("SLURM_RESTART_COUNT", "0")))
    """How often Slurm has queued the allocation again."""
    fenced: bool = False
    """Whether the allocation has begun again elsewhere."""

    @property
    def jobs(self) -> Path:
        return self.directory.parents[1] / "store" / "jobs"


def main(directory: Path, node: int, starting: tuple[list[str], bytes] | None = None) -> int:
    """Returns when nobody wants the allocation any more, or its jobs have left it.

    `starting`: the command that starts an agent on another node, and what it is given on standard input.
    """
    agent = Agent(directory, node, json.loads((directory / "allocation.json").read_text()))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number, why in ((signal.SIGUSR1, "time"), (signal.SIGTERM, "taken")):
        signal.signal(number, _leaves(agent, why))
    if node == 0:
        for left in (*directory.glob("node-*.json"), directory / "leaving"):
            left.unlink(missing_ok=True)
        write_json(directory / "begun", {"turn": agent.turn})
    with node_socket.listening(directory, str(node), TICK) as asked:
        described = compute_node.described(agent.told["components"], node)
        write_json(directory / f"node-{node}.json", {**described, "turn": agent.turn})
        others = _start_others(agent, starting) if node == 0 else []
        if agent.told["local_disk"]:
            local_disk.clear(agent.told["local_disk"], directory)
        _go_on(agent)
        while not agent.leaving and not agent.fenced and _is_wanted(agent):
            node_socket.answer_one(asked, partial(_begin, agent))
            _look_after(agent)
            _tell_kept(agent)
            if time.monotonic() - agent.looked > LOOK_SECONDS:
                _look_at_directory(agent)
    if agent.fenced:
        print("the allocation has begun again elsewhere: what runs here is ended", flush=True)
        end_children()
    elif agent.leaving:
        _leave(agent)
    for step in others:
        step.terminate()
    if agent.told["local_disk"]:
        shutil.rmtree(local_disk.directory_on(agent.told["local_disk"], directory), ignore_errors=True)
    return 0


def _leaves(agent: Agent, why: str) -> Callable[[int, Any], None]:
    def on_signal(number: int, frame: Any) -> None:
        agent.leaving = agent.leaving or why

    return on_signal


def _start_others(agent: Agent, starting: tuple[list[str], bytes] | None) -> list["subprocess.Popen[bytes]"]:
    """The agents of the other nodes: a step for each component of the allocation."""
    components, here, started, first = agent.told["components"], os.environ["SLURMD_NODENAME"], [], 0
    command, given = starting or ([*compute_node.own_command(), "allocation"], b"")
    for place, count in enumerate(components):
        others, exclude = (count - 1, [f"--exclude={here}"]) if place == 0 else (count, [])
        group = [f"--het-group={place}"] if len(components) > 1 else []
        step = ["srun", "--overlap", *group, f"--nodes={others}", f"--ntasks={others}", "--ntasks-per-node=1", *exclude,
                *command, str(agent.directory), f"from-{first or 1}"]  # fmt: skip
        if others:
            started.append(subprocess.Popen(step, stdin=subprocess.PIPE))
            pipe = started[-1].stdin
            assert pipe is not None, "started with one"
            pipe.write(given)
            pipe.close()
        first += count
    return started


def node_number(word: str) -> int:
    """The number of an agent that srun has started. `from-3`: its place among these, counted from 3."""
    _, srun, first = word.rpartition("from-")
    return int(first) + (int(os.environ["SLURM_PROCID"]) if srun else 0)


def _go_on(agent: Agent) -> None:
    """Start again what ran when the allocation was taken away."""
    kept = read_json(agent.directory / f"jobs-{agent.node}.json")
    for name, how in kept.items():
        if how["secret"]:
            message = "Slurm queued its allocation again, and it needs environment variables that only its run can give"
            write_json(agent.jobs / name / "failure.json", {"message": message})
            continue
        _wait_until_free(agent.jobs / name / "lock")
        answer = _started(agent, {"job": {"name": name}, "variables": how["variables"], "secret": []})
        if "error" in answer:
            write_json(agent.jobs / name / "failure.json", {"message": answer["error"]})
    _tell_kept(agent)


def _wait_until_free(lock: Path) -> None:
    end = time.monotonic() + FENCED_SECONDS
    while is_held(lock) and time.monotonic() < end:
        time.sleep(TICK)


def _look_at_directory(agent: Agent) -> None:
    """Whether runs hold the allocation, node 0 leaves it, or it has begun again elsewhere. Runs touch their files. Two
    looks show that, whatever the clocks of the nodes say."""
    agent.looked = time.monotonic()
    agent.fenced = read_json(agent.directory / "begun").get("turn", 0) > agent.turn
    if agent.node and (agent.directory / "leaving").exists():
        agent.leaving = (agent.directory / "leaving").read_text() or "taken"
    seen = {path.name: path.stat().st_mtime for path in (agent.directory / "holders").glob("*")}
    if any(agent.seen.get(name) != at for name, at in seen.items()):
        agent.heard = agent.looked
    agent.seen = seen


def _is_wanted(agent: Agent) -> bool:
    """Whether a job or a run still wants the allocation. The agent of node 0 decides for all."""
    if agent.kept:
        agent.heard = time.monotonic()
    patience = IDLE_SECONDS if agent.had_jobs else FIRST_SECONDS
    if agent.told["array"]:
        return bool(agent.kept)
    return agent.node > 0 or time.monotonic() - agent.heard < patience


def _begin(agent: Agent, request: Mapping[str, Any]) -> dict[str, Any]:
    answer = _started(agent, request)
    _tell_kept(agent)
    return answer


def _started(agent: Agent, request: Mapping[str, Any]) -> dict[str, Any]:
    """Start a job as it is asked for, or, where only its name is given, as its directory says."""
    job, name = request["job"], request["job"]["name"]
    directory = agent.jobs / name
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    (directory / "leave").unlink(missing_ok=True)
    write_json(directory / "allocation", {"lease": agent.directory.name, "node": agent.node})
    variables = dict(request["variables"])
    if sum(agent.told["components"]) > 1:
        variables[ADDRESS] = _meeting_address(agent)
    if agent.told["local_disk"]:
        variables[LOCAL_DISK] = str(local_disk.directory_on(agent.told["local_disk"], agent.directory))
    try:
        if "command" in job:
            jobs.start(agent.jobs, job, jobs.runner_command(), variables)
        else:
            jobs.start_again(agent.jobs, name, jobs.runner_command(), variables)
    except jobs.JobError as error:
        return {"error": str(error)}
    plain = {key: value for key, value in request["variables"].items() if key not in request["secret"]}
    agent.kept[name] = {"variables": plain, "secret": bool(request["secret"])}
    agent.had_jobs = True
    return {"value": True}


def _look_after(agent: Agent) -> None:
    """Note which jobs have ended, and bury the processes that were left to this one."""
    ended = []
    for name in agent.kept:
        if is_held(agent.jobs / name / "lock"):
            agent.gone_since.pop(name, None)
            continue
        since = agent.gone_since.setdefault(name, time.monotonic())
        status = read_json(agent.jobs / name / "status.json")
        killed = not status or (status["reason"] == "exited" and status["exit_status"] < 0)
        if not killed or time.monotonic() - since > LOST_SECONDS:
            ended.append(name)
    for name in ended:
        del agent.kept[name], agent.gone_since[name]
    _reap()


def _leave(agent: Agent) -> None:
    """Tell the jobs to leave, then queue the allocation again if some of them are to go on."""
    if agent.node == 0:
        (agent.directory / "leaving").write_text(agent.leaving)
    for name in agent.kept:
        (agent.jobs / name / "leave").touch()
    end = time.monotonic() + max(agent.told["signal"] - LEFT_MARGIN, 1.0)
    leaves = [agent.jobs / name / "lock" for name in agent.kept if not name.startswith(SERVERS)]
    while any(map(is_held, leaves)) and time.monotonic() < end:
        _reap()
        time.sleep(TICK)
    done = [name for name in agent.kept if read_json(agent.jobs / name / "status.json").get("exit_status") == 0]
    for name in done:
        del agent.kept[name]
    _tell_kept(agent)
    (agent.directory / f"node-{agent.node}.json").unlink(missing_ok=True)
    if agent.node or not any(read_json(file) for file in agent.directory.glob("jobs-*.json")):
        return
    if agent.leaving == "taken":
        time.sleep(TAKEN_SECONDS)
    try:
        print("the allocation's time is over before its jobs are: it is queued again", flush=True)
        slurm.requeue(os.environ["SLURM_JOB_ID"])
        time.sleep(TAKEN_SECONDS)
    except (slurm.Refused, slurm.Away) as error:
        print(f"it could not be queued again: {error}", flush=True)
        for file in agent.directory.glob("jobs-*.json"):
            write_json(file, {})


def _tell_kept(agent: Agent) -> None:
    """Written again later where the disk is full: jobs go on meanwhile."""
    if agent.written == agent.kept:
        return
    try:
        write_json(agent.directory / f"jobs-{agent.node}.json", agent.kept)
        agent.written = dict(agent.kept)
    except OSError as error:
        print(f"{agent.directory}: {error.strerror}", file=sys.stderr, flush=True)
        time.sleep(1.0)


def _meeting_address(agent: Agent) -> str:
    """The address of node 0, where ranks meet."""
    end = time.monotonic() + jobs.START_DEADLINE / 2
    while not (found := read_json(agent.directory / "node-0.json")) and time.monotonic() < end:
        time.sleep(TICK)
    return str(found.get("address", "127.0.0.1"))


def _reap() -> None:
    """Runners and their orphans are left to this process; the step of the other nodes' agents is waited for alike."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return
