"""provision: a machine for the run, given back when the run ends.

Decision: entering waits for the machine in a task, so that the UI shows the queue. Leaving gives the machine back after
every end: a failed stage, a cancellation, a timeout. An orchestrator that is killed gives nothing back: then leases
lapse, and rented machines go down by themselves.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.jobs.session import MachineSession
from infra.provisioning.provision import provision_machine
from rollouts_core.config import MachineConfig
from rollouts_core.observe.runs import RunLog
from rollouts_core.stages.plan import Plan
from rollouts_core.store.store import Store
from tasks.stage_task import WAITING_TASK, recorded, run_name, say


@contextmanager
def provision(settings: MachineConfig, stages: Plan, store: Store, run: RunLog) -> Iterator[MachineSession]:
    """Raises `BadInput` when the machine cannot be used."""
    with run.endings:
        yield provision_task(settings, stages, store, run)


@task(name="provision", task_run_name=run_name, cache_policy=NO_CACHE, **WAITING_TASK)
def provision_task(settings: MachineConfig, stages: Plan, store: Store, run: RunLog) -> MachineSession:
    with recorded(run, "provision"):
        for said in provision_machine(settings, stages, store, run):
            if isinstance(said, MachineSession):
                return said
            say("provision", said)
    raise AssertionError("provisioning ends with a session or raises")
