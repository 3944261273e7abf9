"""The table of replicas, for Prefect's UI and for `rollouts watch`."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

COLUMNS = ("replica", "state", "since", "starts", "tokens/s", "weights", "last sync")


def replica_rows(replicas: Sequence[Mapping[str, Any]], metrics: Mapping[str, float]) -> list[dict[str, str]]:
    """`replicas`: as the job that keeps them tells (`infra.host.pool`); `metrics`: of the trainer's last step."""
    return [_row(replica, metrics) for replica in sorted(replicas, key=lambda replica: str(replica["name"]))]


def _row(replica: Mapping[str, Any], metrics: Mapping[str, float]) -> dict[str, str]:
    name = str(replica["name"])
    rate = metrics.get(f"replicas/{name}/tokens_per_second")
    serves = rate is not None and replica["state"] == "ready"
    values = (
        name,
        "serves" if serves else _state(str(replica["state"])),
        datetime.fromtimestamp(replica["since"]).strftime("%d %b %H:%M:%S"),
        str(replica["starts"]),
        f"{rate:.0f}" if rate is not None and serves else "",
        f"version {metrics['weight_version']:.0f}" if serves and "weight_version" in metrics else "",
        _sync(name.partition(":")[0], metrics) if serves else "",
    )
    return dict(zip(COLUMNS, values, strict=True))


def _state(state: str) -> str:
    """The state to show. A replica that answers serves only once it has the current weights."""
    return {"ready": "waits for weights", "down": "is started again", "away": "not reached"}.get(state, state)


def _sync(machine: str, metrics: Mapping[str, float]) -> str:
    seconds = metrics.get(f"timing_s/weight_sync/bring/{machine}")
    if seconds is None:
        return ""
    sent = metrics.get(f"weight_sync/bytes/{machine}", 0.0)
    return f"{sent / 1e6:.3g} MB in {seconds:.2f} s"
