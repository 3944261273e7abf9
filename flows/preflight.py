"""What is looked at before anything starts: places, inputs, rewards, the Prefect server."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from rollouts_core.config import PipelineConfig
from rollouts_core.errors import BadInput
from rollouts_core.rewards.functions import load_reward
from rollouts_core.stages.plan import Plan, plan
from rollouts_core.store.local import LocalStore

STORE_VARIABLE = "ROLLOUTS_STORE"
SERVER_DEADLINE = 5.0


def place_store(config: PipelineConfig, config_file: Path, option: Path | None) -> PipelineConfig:
    """The config with its store decided: --store, ROLLOUTS_STORE, the config's own, or .rollouts beside `configs/`."""
    folder = config_file.resolve().parent
    project = folder.parent if folder.name == "configs" else folder
    path = named_store(option) or config.store.path or project / ".rollouts"
    outputs = config.store.outputs or path.resolve().parent / "outputs"
    return replace(config, store=replace(config.store, path=path, outputs=outputs))


def named_store(option: Path | None) -> Path | None:
    """The store that --store or ROLLOUTS_STORE names, None when neither does."""
    variable = os.environ.get(STORE_VARIABLE)
    return option or (Path(variable) if variable else None)


def store_of(config: PipelineConfig) -> LocalStore:
    return LocalStore((named_store(config.store.path) or Path(".rollouts")).resolve())


def outputs_of(config: PipelineConfig) -> Path:
    return (config.store.outputs or store_of(config).root.parent / "outputs").resolve()


def check_inputs(config: PipelineConfig) -> Plan:
    """The plan; or one `BadInput` with every problem of inputs, rewards and store that can be seen before running."""
    stages: list[Plan] = []
    problems: list[str] = []
    rewards = [config.evaluation.reward] + ([config.rl.reward] if config.rl else [])
    checks: list[Callable[[], object]] = [lambda: stages.append(plan(config)), store_of(config).check_usable]
    checks += [partial(load_reward, name) for name in rewards]
    for check in checks:
        try:
            check()
        except BadInput as error:
            problems += [new for new in error.problems if not any(new in known for known in problems)]
    if problems:
        raise BadInput(problems, f"config {config.name}")
    return stages[0]


def check_server(url: str) -> None:
    """Raises `BadInput` when a Prefect server is configured and something else, or nothing, answers there."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=SERVER_DEADLINE) as answer:
            healthy = json.load(answer) is True
    except urllib.error.HTTPError as error:
        healthy = error.code in (401, 403)
    except (OSError, ValueError) as error:
        raise BadInput(
            f"no Prefect server answers at {url} ({error}): start it, or unset PREFECT_API_URL to run without one"
        ) from None
    if not healthy:
        raise BadInput(f"what answers at {url} is no Prefect server: another program may have taken its port")
