"""The deployments in Prefect's UI: one for each config, one to evaluate, one for gc.

Decision: the registered deployments are one value, which is also written as prefect.yaml beside `configs/`. So a user
can read what was registered, and can change it and give it to `prefect deploy`. A queue for each machine of the
inventory, with as many runs at once as it has GPUs, keeps runs from piling up there. Leases still decide which run has
which GPU.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL

from flows.forms import filled_in
from flows.preflight import check_server, place_store
from infra.inventory import load_inventory
from rollouts_core.config import MachineConfig, PipelineConfig
from rollouts_core.config.loading import load_config, to_data
from rollouts_core.errors import BadInput

POOL = "rollouts"
PREFECT_YAML = "prefect.yaml"
DEFAULT_QUEUE = "default"

Deployment = Mapping[str, Any]


def deploy_command(options: argparse.Namespace) -> int:
    """Register with the server that is configured. Raises `BadInput` when there is none."""
    url = PREFECT_API_URL.value()
    if not url:
        raise BadInput(
            "PREFECT_API_URL is not set: set it to your server's address, as http://127.0.0.1:4200/api; "
            "or use `rollouts up`"
        )
    check_server(url)
    folder = options.configs.resolve()
    deployments = deployments_of(read_configs(folder, options.store), folder.parent)
    path = write_prefect_yaml(deployments, folder.parent)
    register(deployments)
    names = [str(deployment["name"]) for deployment in deployments]
    if options.json:
        print(json.dumps({"url": url, "file": str(path), "deployments": names}))
        return 0
    print(f"registered {', '.join(names)} from {path}")
    print(f"next: `prefect worker start --pool {POOL}` where runs are to be led from")
    return 0


def read_configs(folder: Path, store: str | None) -> dict[str, PipelineConfig]:
    """All configs of a folder by file name. Raises `BadInput` with the problems of all of them."""
    configs: dict[str, PipelineConfig] = {}
    problems: list[str] = []
    for file in sorted([*folder.glob("*.py"), *folder.glob("*.json")]):
        if file.name.startswith("_"):
            continue
        try:
            configs[file.stem] = place_store(load_config(file), file, store)
        except BadInput as error:
            problems += [f"{file}: {problem}" for problem in error.problems]
    if not configs and not problems:
        problems = [f"{folder}: there is no config in it"]
    if problems:
        raise BadInput(problems)
    return configs


def deployments_of(configs: Mapping[str, PipelineConfig], folder: Path) -> list[Deployment]:
    """The deployments, as prefect.yaml describes them. `folder`: the working directory of their runs."""
    store = to_data(next(iter(configs.values())))["store"]
    return [
        *(
            _deployment(
                name,
                "flows.post_train:post_train",
                {"config": to_data(config), "start_again_from": []},
                folder,
                tags=["post-train", config.machine.kind],
                queue=_queue_of(config.machine),
            )
            for name, config in configs.items()
        ),
        _deployment("evaluate", "flows.evaluate:evaluate_run", {"store": store}, folder, tags=["evaluate"]),
        _deployment("gc", "flows.gc:gc", {"store": store, "dry_run": True}, folder, tags=["gc"]),
    ]


def write_prefect_yaml(deployments: Sequence[Deployment], folder: Path) -> Path:
    path = folder / PREFECT_YAML
    content = {"name": "rollouts", "deployments": [dict(deployment) for deployment in deployments]}
    path.write_text(
        "# Written by `rollouts deploy` from configs/; `prefect deploy --all` registers it as well.\n"
        + yaml.safe_dump(content, sort_keys=False, width=100)
    )
    return path


def register(deployments: Sequence[Deployment]) -> None:
    """Make the work pool and its queues, then all deployments; those of the same name are replaced."""
    limits = {name: max(1, host.gpus) for name, host in load_inventory().items()}
    anyio.run(_register, [_for_prefect(deployment) for deployment in deployments], limits)


async def _register(deployments: Sequence[RunnerDeployment], limits: Mapping[str, int]) -> None:
    await _make_pool(limits)
    async with get_client() as client:
        for deployment in deployments:
            made = await client.read_deployment(await deployment.aapply())
            schema = filled_in(made.parameter_openapi_schema or {}, made.parameters)
            await client.update_deployment(made.id, DeploymentUpdate(parameter_openapi_schema=schema))


def _for_prefect(told: Deployment) -> RunnerDeployment:
    pool = told["work_pool"]
    return RunnerDeployment.from_entrypoint(
        told["entrypoint"],
        told["name"],
        parameters=told["parameters"],
        tags=told["tags"],
        work_pool_name=pool["name"],
        work_queue_name=pool["work_queue_name"],
        job_variables=pool["job_variables"],
    )


def _deployment(
    name: str, entrypoint: str, parameters: Mapping[str, Any], folder: Path, tags: Sequence[str], queue: str = ""
) -> Deployment:
    return {
        "name": name,
        "entrypoint": entrypoint,
        "parameters": dict(parameters),
        "tags": ["rollouts", *tags],
        "work_pool": {
            "name": POOL,
            "work_queue_name": queue or DEFAULT_QUEUE,
            "job_variables": {"working_dir": str(folder), "env": {}},
        },
    }


def _queue_of(machine: MachineConfig) -> str:
    return machine.name or DEFAULT_QUEUE


async def _make_pool(limits: Mapping[str, int]) -> None:
    """The work pool, and a queue for each machine with its limit."""
    async with get_client() as client:
        try:
            await client.read_work_pool(POOL)
        except ObjectNotFound:
            await client.create_work_pool(WorkPoolCreate(name=POOL, type="process", description="Runs of rollouts."))
        for machine, limit in limits.items():
            try:
                queue = await client.read_work_queue_by_name(machine, POOL)
            except ObjectNotFound:
                queue = await client.create_work_queue(machine, work_pool_name=POOL)
            await client.update_work_queue(queue.id, concurrency_limit=limit)
