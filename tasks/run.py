"""The run's record, open for as long as its flow runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from infra.python_envs.trainer import environment_artifact
from rollouts_core.config import MachineConfig, PipelineConfig
from rollouts_core.housekeeping.gc import wait_for_gc
from rollouts_core.housekeeping.refresh import discard_stages, stages_to_refresh
from rollouts_core.observe.runs import RunLog, open_run
from rollouts_core.stages.plan import Plan
from rollouts_core.stages.specs import servers_of
from rollouts_core.store.store import Store
from tasks.serve import EVALUATION


@contextmanager
def recording(
    config: PipelineConfig, stages: Plan, store: Store, flow_run_id: str | None, refresh: Sequence[str] = ()
) -> Iterator[RunLog]:
    """Open the run's record with all that is planned; close it as Completed, Failed or Cancelled, when all has ended.

    `refresh` names stages to make again. A retry of the same flow run goes on with what it has made since.
    """
    run = open_run(store, config, planned_stages(stages, config.machine), flow_run_id)
    try:
        with run.endings:
            wait_for_gc(store)
            if refresh and not run.record.refreshed:
                again = stages_to_refresh(stages, refresh)
                discard_stages(again, store, run.run_id)
                run.refreshing([stage.name for stage in again])
            yield run
    except Exception as error:
        run.end("Failed", str(error))
        raise
    except BaseException as error:
        run.end("Cancelled", type(error).__name__)
        raise
    run.end("Completed")


def planned_stages(stages: Plan, machine: MachineConfig) -> list[tuple[str, str | None]]:
    """All stages of the flow in order, each with its key if its artifact is known before it runs."""
    before = [stage for stage in stages.stages if stage.kind not in ("rl", "evaluate")]
    after = [stage for stage in stages.stages if stage.kind in ("rl", "evaluate")]
    return [
        ("provision", None),
        ("bootstrap", environment_artifact().key if machine.kind == "local" else None),
        *((stage.name, stage.key) for stage in before),
        *((stage.name, None) for stage in stages.served),
        ("serve", None),
        *((stage.name, stage.key) for stage in after if stage.kind == "rl"),
        *([(EVALUATION, None)] if any(servers_of(stage.spec) for stage in stages.evaluate) else []),
        *((stage.name, stage.key) for stage in after if stage.kind == "evaluate"),
        ("sync", None),
        ("report", None),
    ]
