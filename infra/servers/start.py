"""The servers of a run: started on its machine before RL, kept beside it, ended after it."""

import json
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from infra.errors import JobFailed
from infra.jobs.follow import Lines, LogLine, watching
from infra.jobs.placing import leased_gpus, placement_for
from infra.jobs.session import MachineSession
from infra.jobs.stage_job import job_name, start_leased
from infra.machines.machine import Job
from infra.machines.ssh_machine import SSHMachine
from infra.python_envs.engine import engine_python, host_command
from infra.servers.job import serve_job
from infra.servers.model import ServedModel, model_of, to_serve
from infra.servers.packages import packages_of
from infra.servers.pool import end_pool, start_pool
from rollouts_core.config import EngineConfig
from rollouts_core.errors import BadInput
from rollouts_core.stages.stage import Stage
from rollouts_core.store.keys import key_of
from rollouts_core.store.manifest import FILES

LAST_LINES = 25


def start_servers(config: EngineConfig, segments: Sequence[Stage], session: MachineSession) -> Iterator[str]:
    """Start the servers that the segments still to be made need; yields lines until all of them answer.

    Raises `JobFailed` with a server's last lines when it does not come up.
    """
    machine, chain = session.machine, job_name(segments)
    todo = to_serve(segments, session)
    if config.machines is not None:
        yield from start_pool(config, todo[0], chain, session)
        return
    yield from machine.supply(todo)
    python = config.python or (yield from built(config.kind, session))
    place = key_of({"home": machine.places["home"], "job": chain})[:16]
    memory = f"/dev/shm/rollouts-weights.{place}"
    command = host_command(session, "servers")
    model = served_model(todo[0], session)
    job = serve_job(chain, command, config, model, python, placement_for(todo[0], session), memory)
    session.services[chain] = job
    session.expect("serve", job, machine)
    yield from start_leased(job, machine, [job.name])
    yield from until_ready(job, session, "serve")


def built(kind: str, session: MachineSession) -> Generator[str, None, str]:
    """Yields the installer's lines; returns the interpreter that has the engine's packages."""
    for said in engine_python(packages_of(kind, leased_gpus(session) > 0), session):
        if isinstance(said, Path):
            return str(said)
        if said:
            yield said
    raise AssertionError("building ends with the interpreter, or raises")


def end_servers(segments: Sequence[Stage], session: MachineSession, went_well: bool) -> None:
    """End them, or keep those of a pool for another run; where there are none, nothing."""
    if end_pool(job_name(segments), session, went_well):
        return
    if service := session.services.pop(job_name(segments), None):
        session.end(service, session.machine)


def served_model(segment: Stage, session: MachineSession) -> ServedModel:
    """The model that the servers load at their start: the policy that the segment begins with.

    Raises `BadInput` if the jobs' artifacts are at a URL and not on their machine.
    """
    if policy := segment.inputs.get("policy"):
        if session.store.url is not None and isinstance(session.machine, SSHMachine):
            raise BadInput("engine.kind: servers on another machine need its own store; set store.url to null")
        if isinstance(session.machine, SSHMachine):
            path = f"{session.machine.places['home']}/artifacts/{policy.directory}/{FILES}/policy"
        else:
            path = str((session.store.open(policy) / "policy").resolve())
    else:
        path = session.machine.placed(segment).external["model"].location
    return model_of(segment.spec, path)


def until_ready(job: Job, session: MachineSession, said: str) -> Iterator[str]:
    """Yields the job's lines until all its servers answer. `said`: the stage, as it is shown.

    Raises `JobFailed` with their last lines when they do not come up.
    """
    machine = session.machine
    lines, records, last = Lines(), Lines(), list[str]()
    begun = machine.attempt(job.name)
    session.run.job(said, machine.name, job.name, begun.log)
    patience = session.settings.unreachable_limit_hours * 3600
    for seen in watching(machine, job.name, begun, patience):
        session.run.touch()
        if isinstance(seen, LogLine):
            yield seen.text
            continue
        new = lines.take(seen.log)
        last = [*last, *new][-LAST_LINES:]
        yield from new
        for record in records.take(seen.metrics):
            told = json.loads(record)
            if told["ready"] == told["of"]:
                return
        if seen.status.state != "running" and not seen.log:
            raise JobFailed(f"{said}: {seen.status.message or seen.status.reason or 'was killed'}", tuple(last), False)
