"""Servers on this machine beside one command, as `rollouts serve` wants them: started, waited for, ended with it."""

import json
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from infra.errors import JobFailed
from infra.host import jobs
from infra.host.facts import gpus
from infra.python_envs.engine import built_here
from infra.servers.job import serve_job
from infra.servers.model import ServedModel
from infra.servers.packages import packages_of
from rollouts_core.config import EngineConfig, placement_of
from rollouts_core.errors import BadInput

LOOK_SECONDS = 0.5
LAST_LINES = 15


@contextmanager
def servers_here(config: EngineConfig, model: ServedModel, home: Path, on_gpu: bool) -> Iterator[Path]:
    """The directory of running servers of a policy.

    Raises `BadInput` where nothing is installed to serve with, `JobFailed` with their last lines when they do not come
    up. Whoever uses them looks after them every two minutes, or they end.
    """
    python = config.python or built_here(packages_of(config.kind, on_gpu))
    if python is None:
        raise BadInput(
            f"engine.kind {config.kind}: no environment with its packages was built on this machine yet; a run of "
            "this config builds one, `engine.python` names another, and `--embedded` does without"
        )
    name = f"talk-{secrets.token_hex(4)}"
    command = (sys.executable, "-m", "infra.host.servers", "{directory}")
    memory = f"/dev/shm/rollouts-weights.{name}"
    try:
        placement = placement_of(len(gpus()) if on_gpu else 0, 0, config)
    except ValueError as error:
        raise BadInput(f"engine: {error}") from None
    job = serve_job(name, command, config, model, str(python), placement, memory)
    jobs.start(home / "jobs", asdict(job), jobs.runner_command(), {})
    try:
        directory = home / "jobs" / job.name
        _wait(directory, config)
        yield directory
    finally:
        jobs.cancel(home / "jobs", job.name)


def _wait(directory: Path, config: EngineConfig) -> None:
    end = time.monotonic() + config.start_minutes * 60
    while time.monotonic() < end:
        if jobs.poll(directory.parent, directory.name)["state"] != "running":
            break
        with suppress(OSError, ValueError, IndexError):
            told = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
            if told["ready"] == told["of"]:
                return
        time.sleep(LOOK_SECONDS)
    lines = (directory / "log").read_text(errors="replace").splitlines()[-LAST_LINES:]
    raise JobFailed(f"serve: {config.kind} did not start", tuple(lines), False)
