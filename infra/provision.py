"""A machine for a run, from its config."""

from infra.jobs import MachineSession
from infra.local import LocalMachine
from rollouts_core.config import MachineConfig
from rollouts_core.observe.runs import RunLog
from rollouts_core.store.store import Store


def provision_machine(settings: MachineConfig, store: Store, run: RunLog) -> MachineSession:
    """Raises `BadInput` when the store or its disk is not usable."""
    store.check_usable()
    return MachineSession(LocalMachine(store.home / "jobs"), store, settings, run)


def release_machine(session: MachineSession) -> None:
    """End what the run's jobs left running; nothing is leased on this machine."""
    for job in list(session.cursors):
        session.machine.cancel(job)
