"""gc as a flow, so that it can be scheduled: what it removed, or would remove, is a table in Prefect's UI."""

from dataclasses import asdict

from prefect import flow
from prefect.artifacts import create_table_artifact

from flows.preflight import HOME
from rollouts_core.config import StoreConfig
from rollouts_core.housekeeping.gc import collect_garbage
from rollouts_core.store.store import open_store


@flow(name="gc", flow_run_name="gc", persist_result=False)
def gc(store: StoreConfig, keep_last: int | None = None, dry_run: bool = True) -> int:
    """Removes what no kept run needs, and never what a live run uses. Returns how many bytes.

    Args:
        store: Where artifacts live.
        keep_last: Keep the last so many runs of each name; null keeps all runs.
        dry_run: Only say what would be removed.
    """
    removals = collect_garbage(open_store((store.path or HOME).resolve(), store.url), keep_last, dry_run)
    create_table_artifact(
        [asdict(removal) for removal in removals],
        key="removed",
        description="What would be removed" if dry_run else "What was removed",
    )
    return sum(removal.size for removal in removals)
