"""The runs that the worker of `rollouts up` leads: ended with it, and told as crashed where it was killed before."""

import anyio
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.states import Cancelling, Crashed

from flows.deployments import POOL

UNDER_WAY = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
END_SECONDS = 60.0
LOOK_SECONDS = 0.5
LOST = "What led this run was killed. Retry goes on from what was committed."


def cancel_runs() -> None:
    """Cancel every run under way, and wait until they have ended, or a minute."""
    anyio.run(_cancel_runs)


def tell_lost_runs() -> None:
    """Call what a worker that was killed had under way crashed, so that it can be retried.

    To be called before a worker is started, where no other worker serves the pool.
    """
    anyio.run(_tell_lost_runs)


async def _cancel_runs() -> None:
    async with get_client() as client:
        for run in await _under_way(client):
            await client.set_flow_run_state(run.id, Cancelling())
        with anyio.move_on_after(END_SECONDS):
            while await _under_way(client):
                await anyio.sleep(LOOK_SECONDS)


async def _tell_lost_runs() -> None:
    async with get_client() as client:
        for run in await _under_way(client):
            await client.set_flow_run_state(run.id, Crashed(message=LOST), force=True)


async def _under_way(client: PrefectClient) -> list[FlowRun]:
    return await client.read_flow_runs(
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=UNDER_WAY))),
        work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[POOL])),
    )
