"""provision: a machine for the run, given back when the run ends."""

from collections.abc import Iterator
from contextlib import contextmanager

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.jobs import MachineSession
from infra.provision import provision_machine, release_machine
from rollouts_core.config import MachineConfig
from rollouts_core.observe.runs import RunLog
from rollouts_core.store.store import Store
from tasks.making import LIGHT_TASK, recorded


@contextmanager
def provision(settings: MachineConfig, store: Store, run: RunLog) -> Iterator[MachineSession]:
    """Raises `BadInput` when the machine cannot be used."""
    session = provision_task(settings, store, run)
    try:
        yield session
    finally:
        release_machine(session)


@task(name="provision", task_run_name="provision", cache_policy=NO_CACHE, **LIGHT_TASK)
def provision_task(settings: MachineConfig, store: Store, run: RunLog) -> MachineSession:
    with recorded(run, "provision"):
        return provision_machine(settings, store, run)
