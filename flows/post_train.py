"""The whole chain: SFT, DPO, then RL, each stage cached, on a machine of your choice."""

from collections.abc import Sequence

from prefect import flow
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run

from flows.preflight import check_inputs, outputs_of, store_of
from infra.provision import this_machine
from rollouts_core.config import PipelineConfig
from rollouts_core.observe.runs import RunRecord
from tasks.bootstrap import bootstrap
from tasks.dpo import dpo
from tasks.evaluate import evaluate
from tasks.making import ArtifactRef
from tasks.provision import provision
from tasks.report import report
from tasks.rl import rl
from tasks.run import recording
from tasks.serve import serve
from tasks.sft import sft
from tasks.sync import sync
from tasks.tokenize import tokenize


@flow(name="post-train", flow_run_name="{config.name}", persist_result=False)
def post_train(config: PipelineConfig, refresh: Sequence[str] = ()) -> RunRecord:
    """SFT, DPO, then RL, on a machine of your choice; every stage cached. `refresh`: stages to make again."""
    stages, store = check_inputs(config, refresh), store_of(config)
    with (
        recording(config, stages, store, flow_run.id, refresh) as run,
        provision(config.machine, stages, store, run) as machine,
    ):
        bootstrap(machine)
        data = tokenize(stages.tokenize, this_machine(config.machine, store, run))
        policy = sft(stages.sft, data, machine) if stages.sft else None
        policy = dpo(stages.dpo, policy, machine) if stages.dpo else policy
        beside: list[PrefectFuture[ArtifactRef]] = []
        with serve(config.engine, stages.rl, machine):
            for segment in stages.rl:
                policy = rl(segment, stages.rl, policy, machine)
                beside += [evaluate.submit(point, [point], data, machine) for point in stages.during_rl(segment)]
        for point in stages.after_training:
            evaluate(point, stages.after_training, data, machine)
        for evaluated in beside:
            evaluated.result()
        results = sync(stages, policy, machine, config.results, outputs_of(config))
        return report(config, stages, machine, results)
