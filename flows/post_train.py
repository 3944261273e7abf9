"""The whole chain: SFT, DPO, then RL, each stage cached, on a machine of your choice."""

from collections.abc import Sequence
from typing import Annotated

from prefect import flow
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run
from pydantic import Field

from flows.preflight import check_inputs, outputs_of, store_of
from flows.supervisor import end_with_worker
from infra.provisioning.provision import this_machine
from rollouts_core.config import PipelineConfig
from rollouts_core.observe.run_records import RunRecord
from tasks.bootstrap import bootstrap
from tasks.dpo import dpo
from tasks.evaluate import evaluate
from tasks.pages import listing, pages
from tasks.provision import provision
from tasks.push import push
from tasks.report import report
from tasks.rl import rl
from tasks.run import recording
from tasks.serve import serve, serve_beside, serve_evaluation
from tasks.sft import sft
from tasks.showing import show_plan
from tasks.stage_task import ArtifactRef
from tasks.sync import sync
from tasks.tokenize import tokenize
from tasks.tracking import tracking

Chosen = Annotated[str, Field(json_schema_extra={"enum": ["tokenize", "sft", "dpo", "rl", "evaluate"]})]
"""A kind of stage, which the form offers; or a single stage's name, as rl-2, which the command line takes."""


@flow(name="post-train", flow_run_name="{config.name}", persist_result=False)
def post_train(config: PipelineConfig, start_again_from: Sequence[Chosen] = ()) -> RunRecord:
    """SFT, DPO, then RL, on a machine of your choice; every stage cached, and whatever is cached is not made again.

    Args:
        config: The experiment.
        start_again_from: Stages to make again although they are cached, with all that depends on them.
    """
    end_with_worker()
    stages, store = check_inputs(config, start_again_from), store_of(config)
    outputs = outputs_of(config)
    with (
        listing(store, outputs),
        recording(config, stages, store, flow_run.id, start_again_from) as run,
        pages(config, run, store, outputs),
        tracking(config, run.run_id, outputs),
        provision(config.machine, stages, store, run) as machine,
    ):
        show_plan(stages, store, config.machine)
        bootstrap(machine)
        data = tokenize(stages.tokenize, this_machine(config.machine, store, run), machine)
        policy = sft(stages.sft, data, machine) if stages.sft else None
        policy = dpo(stages.dpo, policy, machine) if stages.dpo else policy
        beside: list[PrefectFuture[ArtifactRef]] = []
        with serve_beside(stages, machine):
            with serve(config.engine, stages.rl, machine):
                for segment in stages.rl:
                    policy = rl(segment, stages.rl, policy, machine)
                    beside += [evaluate.submit(point, [point], data, machine) for point in stages.during_rl(segment)]
            with serve_evaluation(config.evaluation.engine, stages.after_training, machine):
                for point in stages.after_training:
                    evaluate(point, stages.after_training, data, machine)
            for evaluated in beside:
                evaluated.result()
        results = sync(stages, policy, machine, config.results, outputs)
        record = report(config, stages, machine, results)
        if config.results.hub:
            push(config, machine, results)
        return record
