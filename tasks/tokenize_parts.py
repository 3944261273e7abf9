"""The parts of tokenization: one mapped task each, on threads here or on a cluster that Prefect knows.

Decision: a task is given plain data and opens the store itself, so it may run in any process of any host that reaches
the store. The work is done in a process of its own, as every stage's, since rendering holds Python's lock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prefect import flow, task, unmapped
from prefect.cache_policies import NO_CACHE
from prefect.futures import as_completed
from prefect.logging import get_run_logger
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from infra.jobs.follow import LogLine
from infra.jobs.session import MachineSession
from infra.jobs.stage_job import job_name, make_in_job
from infra.machines.machine import new_name
from infra.provisioning.provision import this_machine
from rollouts_core.config import MachineConfig, TokenizationConfig
from rollouts_core.observe.run_records import RunRecord
from rollouts_core.observe.runs import RunLog
from rollouts_core.stages.specs import TokenizeSpec
from rollouts_core.stages.stage import Stage
from rollouts_core.stages.tokenize_parts import parts_of
from rollouts_core.store.store import open_store
from tasks.events import StageProgress, announce
from tasks.stage_task import JOB_TASK, run_name


@dataclass(frozen=True)
class Place:
    """The place that makes parts, as plain data."""

    settings: MachineConfig
    home: Path
    url: str | None
    asked_by: str
    """The name under which the parts are asked for, and may be cancelled."""


def tokenize_in_parts(stage: Stage, machine: MachineSession) -> None:
    """Whoever stops waiting ends the parts that run here. Raises what a part raises."""
    assert isinstance(stage.spec, TokenizeSpec), "only this stage is made in parts"
    tokenizer, parts = parts_of(stage)
    place = Place(machine.settings, machine.store.home, machine.store.url, new_name())
    mapped = part_tasks.with_options(task_runner=task_runner(stage.spec.tokenization))
    try:
        mapped(stage.name, tokenizer, parts, place)
    except BaseException:
        for part in (tokenizer, *parts):
            machine.machine.cancel(job_name([part]), place.asked_by)
        raise


def task_runner(settings: TokenizationConfig) -> TaskRunner[Any]:
    match settings.task_runner:
        case "threads":
            return ThreadPoolTaskRunner(max_workers=settings.parts)
        case "dask":
            from prefect_dask import DaskTaskRunner

            workers = {"n_workers": settings.parts, "threads_per_worker": 1, "dashboard_address": None}
            started = None if settings.cluster else workers
            dask: TaskRunner[Any] = DaskTaskRunner(address=settings.cluster, cluster_kwargs=started)
            return dask
        case "ray":
            from prefect_ray import RayTaskRunner

            ray: TaskRunner[Any] = RayTaskRunner(address=settings.cluster)
            return ray
        case "slurm":
            raise AssertionError("a job array is not a task runner of Prefect")


@flow(name="tokenize-parts", flow_run_name="{name} in parts", validate_parameters=False, persist_result=False)
def part_tasks(name: str, tokenizer: Stage, parts: Sequence[Stage], place: Place) -> None:
    tokenize_part(tokenizer, place)
    futures = tokenize_part.map(list(parts), unmapped(place))
    for done, future in enumerate(as_completed(futures), 1):
        future.result()
        announce(StageProgress(name, done, len(parts), {}))


@task(name="tokenize-part", task_run_name=run_name, cache_policy=NO_CACHE, **JOB_TASK)
def tokenize_part(stage: Stage, place: Place) -> None:
    store = open_store(place.home, place.url)
    if store.has(stage.artifact):
        return
    with TemporaryDirectory() as nobodys:
        notes = RunLog(Path(nobodys), RunRecord(stage.name, stage.name, "Running", "", 0.0, None, ()), None)
        session = replace(this_machine(place.settings, store, notes), asked_by=place.asked_by)
        with notes.endings:
            for event in make_in_job(stage, [stage], session):
                if isinstance(event, LogLine):
                    get_run_logger().info(event.text)
