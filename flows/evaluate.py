"""Evaluation alone: every policy of a config that is there, on its held-out prompts."""

from dataclasses import replace

from prefect import flow
from prefect.runtime import flow_run

from flows.preflight import HOME, check_inputs, outputs_of, store_of
from flows.supervisor import end_with_worker
from infra.provisioning.provision import this_machine
from rollouts_core.config import EvaluationConfig, PipelineConfig, StoreConfig
from rollouts_core.config.loading import load_config
from rollouts_core.errors import BadInput
from rollouts_core.observe.run_list import find_run
from rollouts_core.observe.run_records import RunRecord
from rollouts_core.stages.plan import evaluations_alone
from tasks.bootstrap import bootstrap
from tasks.evaluate import evaluate
from tasks.pages import listing
from tasks.provision import provision
from tasks.report import report
from tasks.run import recording
from tasks.serve import serve_beside, serve_evaluation
from tasks.showing import show_plan
from tasks.sync import sync
from tasks.tokenize import tokenize


@flow(name="evaluate", flow_run_name="{config.name} evaluated", persist_result=False)
def evaluate_policies(config: PipelineConfig, against: str | None = None) -> RunRecord:
    """Evaluates the policies of a config that have been trained, and trains none.

    Args:
        config: The experiment.
        against: A run to compare with, on the same prompts.
    """
    return _evaluated(config, against)


@flow(name="evaluate-run", flow_run_name="{run} evaluated", persist_result=False)
def evaluate_run(
    run: str, store: StoreConfig, evaluation: EvaluationConfig | None = None, against: str | None = None
) -> RunRecord:
    """Evaluates the policies that a run has trained, as its config says or otherwise, and trains none.

    Args:
        run: A run's id, or the beginning of it; `rollouts runs` lists them.
        store: Where the run is recorded.
        evaluation: How to evaluate; null as the run's config says.
        against: Another run to compare with, on the same prompts.
    """
    home = (store.path or HOME).resolve()
    config = load_config(home / "runs" / find_run(home, run).run_id / "config.json")
    return _evaluated(replace(config, evaluation=evaluation or config.evaluation), against)


def _evaluated(config: PipelineConfig, against: str | None) -> RunRecord:
    end_with_worker()
    stages, store = evaluations_alone(check_inputs(config)), store_of(config)
    if not stages.evaluate:
        raise BadInput("data.heldout: is required to evaluate")
    with (
        listing(store, outputs_of(config)),
        recording(config, stages, store, flow_run.id) as run,
        provision(config.machine, stages, store, run) as machine,
    ):
        show_plan(stages, store, config.machine)
        bootstrap(machine)
        data = tokenize(stages.tokenize, this_machine(config.machine, store, run), machine)
        there = [point for point in stages.evaluate if all(map(machine.has, point.inputs.values()))]
        with serve_beside(stages, machine), serve_evaluation(config.evaluation.engine, there, machine):
            for point in there:
                evaluate(point, there, data, machine)
        stages = replace(stages, evaluate=tuple(there))
        results = sync(stages, None, machine, config.results, outputs_of(config))
        return report(config, stages, machine, results, against)
