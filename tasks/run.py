"""The run's record, open for as long as its flow runs."""

from collections.abc import Iterator
from contextlib import contextmanager

from infra.environment import environment_artifact
from rollouts_core.config import PipelineConfig
from rollouts_core.observe.runs import RunLog, open_run
from rollouts_core.stages.plan import Plan
from rollouts_core.store.local import LocalStore


@contextmanager
def recording(config: PipelineConfig, stages: Plan, store: LocalStore, flow_run_id: str | None) -> Iterator[RunLog]:
    """Open the run's record with all that is planned; close it as Completed, Failed or Cancelled."""
    run = open_run(store.root, config, planned_stages(stages), flow_run_id)
    try:
        yield run
    except Exception as error:
        run.end("Failed", str(error))
        raise
    except BaseException as error:
        run.end("Cancelled", type(error).__name__)
        raise
    run.end("Completed")


def planned_stages(stages: Plan) -> list[tuple[str, str | None]]:
    """Every stage of the flow in order, with its key where it makes an artifact."""
    before = [stage for stage in stages.stages if stage.kind in ("tokenize", "sft")]
    after = [stage for stage in stages.stages if stage.kind not in ("tokenize", "sft")]
    return [
        ("provision", None),
        ("bootstrap", environment_artifact().key),
        *((stage.name, stage.key) for stage in before),
        ("serve", None),
        *((stage.name, stage.key) for stage in after),
        ("sync", None),
        ("report", None),
    ]
