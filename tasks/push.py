"""push: the policy goes to the hub, with a card made from the run."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.jobs.session import MachineSession
from rollouts_core.config import PipelineConfig
from rollouts_core.config.loading import to_data
from rollouts_core.observe.card import model_card
from rollouts_core.observe.hub import push_policy
from rollouts_core.observe.provenance import read_made
from tasks.stage_task import WAITING_TASK, recorded, run_name, say


@task(name="push", task_run_name=run_name, cache_policy=NO_CACHE, **WAITING_TASK)
def push(config: PipelineConfig, machine: MachineSession, results: Path) -> str:
    assert config.results.hub, "asked where there is one"
    with recorded(machine.run, "push"):
        card = model_card(config.results.hub, machine.run.record, to_data(config), read_made(results))
        address = push_policy(config.results.hub, results / "policy", card)
        say("push", f"{address} has the policy and its card")
    return address
