"""Checks before anything starts: places, inputs, rewards, the Prefect server."""

import importlib.util
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from http.client import HTTPException
from pathlib import Path

from infra.machines.requirements import engine_hosts, fitting_hosts, passed_variables, wanted_gpus
from infra.servers.capacity import replicas_on
from rollouts_core.config import EngineConfig, PipelineConfig, Served, TokenizationConfig
from rollouts_core.config.algorithms import CustomAlgorithm
from rollouts_core.config.placement import gpus_of_server
from rollouts_core.environments.registry import check_environment, load_environment
from rollouts_core.errors import MISSHAPEN, BadInput
from rollouts_core.housekeeping.refresh import stages_to_refresh
from rollouts_core.inference.families import is_reward_model
from rollouts_core.observe.hub import check_hub
from rollouts_core.observe.trackers import check_tracking
from rollouts_core.rewards.functions import load_reward
from rollouts_core.rewards.scoring import check_reward
from rollouts_core.stages.plan import Plan, plan
from rollouts_core.store.identity import is_url
from rollouts_core.store.store import Store, open_store
from rollouts_core.user_code import load_function

STORE_VARIABLE = "ROLLOUTS_STORE"
HOME = Path(".rollouts")
TASK_RUNNERS = {"dask": "prefect_dask", "ray": "prefect_ray"}
"""The packages of Prefect's integrations."""
SERVER_DEADLINE = 5.0

_checked: ContextVar[tuple[PipelineConfig, tuple[str, ...], Plan] | None] = ContextVar("checked", default=None)


def place_store(config: PipelineConfig, config_file: Path, option: str | None) -> PipelineConfig:
    """The config with its store decided: --store, ROLLOUTS_STORE, the config's own, or .rollouts beside `configs/`."""
    folder = config_file.resolve().parent
    project = folder.parent if folder.name == "configs" else folder
    home, url = config.store.path or project / ".rollouts", config.store.url
    if named := named_store(option):
        home, url = (home, named) if is_url(named) else (Path(named), None)
    outputs = config.store.outputs or home.resolve().parent / "outputs"
    return replace(config, store=replace(config.store, path=home, url=url, outputs=outputs))


def named_store(option: str | None) -> str | None:
    """The directory or URL that --store or ROLLOUTS_STORE names, None when neither does."""
    return option or os.environ.get(STORE_VARIABLE) or None


def store_named(option: str | None) -> Store:
    """The store of commands that read no config: the one named, or .rollouts here."""
    named = named_store(option) or str(HOME)
    return open_store(HOME.resolve(), named) if is_url(named) else open_store(Path(named).resolve())


def store_of(config: PipelineConfig) -> Store:
    return open_store((config.store.path or HOME).resolve(), config.store.url)


def outputs_of(config: PipelineConfig) -> Path:
    return (config.store.outputs or store_of(config).home.parent / "outputs").resolve()


@contextmanager
def checked(config: PipelineConfig, refresh: Sequence[str] = ()) -> Iterator[Plan]:
    """The plan, as `check_inputs`; a flow that is run inside takes it over and does not plan again."""
    stages = check_inputs(config, refresh)
    token = _checked.set((config, tuple(refresh), stages))
    try:
        yield stages
    finally:
        _checked.reset(token)


def check_inputs(config: PipelineConfig, refresh: Sequence[str] = ()) -> Plan:
    """The plan; or one `BadInput` with every problem of inputs, rewards and store that can be seen before running."""
    known = _checked.get()
    if known is not None and known[:2] == (config, tuple(refresh)):
        return known[2]
    stages: list[Plan] = []
    problems: list[str] = []
    rewards = [config.evaluation.reward] + ([config.rl.reward] if config.rl else [])
    checks: list[Callable[[], object]] = [lambda: stages.append(plan(config)), lambda: store_of(config).check_usable()]
    checks += [partial(_check_reward, name, config) for name in rewards]
    if config.rl and isinstance(config.rl.algorithm, CustomAlgorithm):
        checks.append(partial(load_function, config.rl.algorithm.function, {}, "algorithm"))
    if config.environment is not None:
        checks.append(partial(_check_environment, config))
    checks.append(partial(check_task_runner, config.data.tokenization))
    checks.append(partial(check_tracking, config.tracking))
    checks.append(partial(check_hub, config.results))
    checks += [] if config.machine.kind == "local" else [partial(passed_variables, config.machine)]
    checks += [partial(fitting_hosts, config.machine)] if config.machine.kind in ("ssh", "slurm") else []
    if (engine := config.evaluation.engine) is not None:
        checks.append(partial(_check_engine_machines, config, "evaluation.engine", engine, {}))
    taken: dict[str, int] = {}
    checks += [partial(_check_engine_machines, config, "engine", config.engine, taken)] if config.rl else []
    checks += [
        partial(_check_engine_machines, config, f"served.{one.name}.engine", one.engine, taken) for one in config.served
    ]
    checks += [partial(_check_served, one) for one in config.served]
    checks.append(lambda: stages and stages_to_refresh(stages[0], refresh))
    for check in checks:
        try:
            check()
        except BadInput as error:
            problems += [new for new in error.problems if not any(new in known for known in problems)]
    if problems:
        raise BadInput(problems, f"config {config.name}")
    return stages[0]


def _check_reward(name: str, config: PipelineConfig) -> None:
    reward = load_reward(name)
    if config.machine.kind == "local":
        check_reward(reward)


def _check_environment(config: PipelineConfig) -> None:
    assert config.environment is not None, "asked where there is one"
    environment = load_environment(config.environment.name)
    if config.machine.kind == "local":
        check_environment(environment)


def _check_engine_machines(config: PipelineConfig, field: str, engine: EngineConfig, taken: dict[str, int]) -> None:
    """Raises `BadInput` where a machine is not known or does not fit, or all together have too little room.

    `taken`: GPUs of each machine that other servers of the run have at the same time; these are added.
    """
    asked = engine.machines
    if asked is None or asked.rented or asked.nodes:
        return
    hosts = engine_hosts(asked, (config.machine.name, *config.machine.peers))
    room, shared = 0, []
    for name, host in hosts.items():
        leased = host.gpus if asked.gpus is None else asked.gpus
        trains = wanted_gpus(config.machine, host.gpus) if name in (config.machine.name, *config.machine.peers) else 0
        if leased + trains + taken.get(name, 0) > host.gpus:
            shared.append(name)
        elif room < engine.replicas:
            taken[name] = taken.get(name, 0) + leased
            room += replicas_on(engine, 0 if config.machine.device == "cpu" else leased, room, len(hosts))
    if room < engine.min_replicas:
        others = (
            f"; the trainer or other servers of this run take the GPUs of {', '.join(shared)} (say machines.gpus)"
            if shared
            else ""
        )
        raise BadInput(
            f"{field}.min_replicas: {', '.join(hosts)} have room for {room} servers of {gpus_of_server(engine)} GPUs, "
            f"and {engine.min_replicas} are needed{others}"
        )


def _check_served(served: Served) -> None:
    """Raises `BadInput` for a reward model, by a local directory's config, on servers that give no scores."""
    if served.task == "score" and served.engine.kind != "embedded" and is_reward_model(served.model.name):
        raise BadInput(
            f"served.{served.name}.engine.kind: {served.engine.kind} gives a teacher's log-probabilities, and "
            f"{served.model.name} is a reward model; use embedded"
        )


def check_task_runner(settings: TokenizationConfig) -> None:
    """Raises `BadInput` when the package of the cluster's task runner is not installed."""
    package = TASK_RUNNERS.get(settings.task_runner)
    if package and importlib.util.find_spec(package) is None:
        raise BadInput(
            f"data.tokenization.task_runner: {settings.task_runner} needs the package {package.replace('_', '-')}: "
            f"install rollouts[{settings.task_runner}]"
        )


def check_server(url: str) -> None:
    """Raises `BadInput` when a Prefect server is configured and something else, or nothing, answers there."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=SERVER_DEADLINE) as answer:
            healthy = json.load(answer) is True
    except urllib.error.HTTPError as error:
        healthy = error.code in (401, 403)
    except (*MISSHAPEN, OSError, HTTPException) as error:
        raise BadInput(
            f"no Prefect server answers at {url} ({error}): start it, or unset PREFECT_API_URL to run without one"
        ) from None
    if not healthy:
        raise BadInput(f"the program at {url} is not a Prefect server: another program may use its port")
