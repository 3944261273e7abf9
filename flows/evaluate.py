"""Evaluation alone: every policy of a config that is there, on its held-out prompts."""

from dataclasses import replace

from prefect import flow
from prefect.runtime import flow_run

from flows.preflight import check_inputs, outputs_of, store_of
from infra.provision import this_machine
from rollouts_core.config import PipelineConfig
from rollouts_core.errors import BadInput
from rollouts_core.observe.runs import RunRecord
from rollouts_core.stages.plan import evaluations_alone
from tasks.bootstrap import bootstrap
from tasks.evaluate import evaluate
from tasks.provision import provision
from tasks.report import report
from tasks.run import recording
from tasks.sync import sync
from tasks.tokenize import tokenize


@flow(name="evaluate", flow_run_name="{config.name} evaluated", persist_result=False)
def evaluate_policies(config: PipelineConfig, against: str | None = None) -> RunRecord:
    """Evaluates the policies of a config that have been trained, and trains none. `against`: a run to compare with."""
    stages, store = evaluations_alone(check_inputs(config)), store_of(config)
    if not stages.evaluate:
        raise BadInput("data.heldout: is required to evaluate")
    with (
        recording(config, stages, store, flow_run.id) as run,
        provision(config.machine, stages, store, run) as machine,
    ):
        bootstrap(machine)
        data = tokenize(stages.tokenize, this_machine(config.machine, store, run))
        there = [point for point in stages.evaluate if all(map(machine.has, point.inputs.values()))]
        for point in there:
            evaluate(point, there, data, machine)
        stages = replace(stages, evaluate=tuple(there))
        results = sync(stages, None, machine, config.results, outputs_of(config))
        return report(config, stages, machine, results, against)
