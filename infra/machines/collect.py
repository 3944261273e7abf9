"""Removing from a machine what no kept run needs there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infra.connection.remote import Remote
from infra.errors import MachineError
from infra.inventory import Host
from rollouts_core.housekeeping.gc import Removal, last_of_each_name, needed_artifacts
from rollouts_core.store.elsewhere import forget_elsewhere
from rollouts_core.store.store import Store

PATIENCE = 20.0
COLLECT_SECONDS = 600.0
TRIES = 5


@dataclass(frozen=True)
class _Noted:
    """A run as the machine knows it."""

    run: str
    name: str
    needs: Sequence[str]
    live: bool


def collect_on_machine(name: str, host: Host, store: Store, keep_last: int | None, dry_run: bool) -> list[Removal]:
    """Remove artifacts, partial work and jobs there that no kept run needs, nor a run or pin of the store here.

    Kept are live runs and, of each name, the last `keep_last` that used the machine; all of them where that is None.
    Raises `BadInput` or `MachineError` when the machine cannot be reached.
    """
    remote = Remote(name, host, PATIENCE)
    try:
        remote.open()
        for _ in range(TRIES):
            noted = [_noted(entry) for entry in remote.call("noted_runs")]
            kept_runs = last_of_each_name(noted, keep_last, lambda run: run.live)
            needed = needed_artifacts(store, keep_last).union(*(run.needs for run in kept_runs))
            removed = remote.call(
                "collect", COLLECT_SECONDS, kept=sorted(needed), kept_runs=[run.run for run in kept_runs],
                other_runs=[run.run for run in noted if run not in kept_runs], dry_run=dry_run,
            )  # fmt: skip
            if removed is not None:
                break
        else:
            raise MachineError(f"{name}: runs begin there all the time: try again later")
    finally:
        remote.close()
    for kind, artifact, _ in removed:
        if kind == "artifact" and not dry_run:
            forget_elsewhere(store.home, name, artifact)
    return [Removal(kind, artifact, size) for kind, artifact, size in removed]


def _noted(entry: dict[str, Any]) -> _Noted:
    return _Noted(entry["run"], entry["name"], tuple(entry["needs"]), bool(entry["live"]))
