"""Real inference servers for tests: SGLang and vLLM on this machine's CPU, one of each for a whole session.

Their environments are built by `make engines` (some gigabytes); where there are none, tests that need them are skipped
by name.
"""

import json
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from infra.host import jobs
from infra.servers.job import serve_job
from infra.servers.model import ServedModel
from rollouts_core.config import EngineConfig, placement_of
from rollouts_core.inference.replicas import SupervisedServers

START_SECONDS = 300.0
ENGINES = Path(__file__).parents[1] / ".engines"


def engine_python(kind: str) -> str:
    """The interpreter that has the server's package; skips where it was not built."""
    python = ENGINES / kind / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no {kind} here: `make engines` builds it")
    return str(python)


@dataclass(frozen=True)
class RunningServers:
    directory: Path

    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "servers.json").read_text())
        return found

    def log(self) -> str:
        return (self.directory / "log").read_text()


@contextmanager
def running_servers(
    parent: Path, config: EngineConfig, model: ServedModel, seconds: float = START_SECONDS, gpus: int = 0
) -> Iterator[RunningServers]:
    """Started as the pipeline starts them: a job with its runner, ended with all that belongs to it. `gpus`: of this
    machine, which the trainer shares."""
    config_python = config.python or engine_python(config.kind)
    memory = f"/dev/shm/rollouts-tests.{secrets.token_hex(8)}"
    placement = placement_of(gpus, 1, config)
    command = (sys.executable, "-m", "infra.host.servers", "{directory}")
    job = serve_job("tests", command, config, model, config_python, placement, memory)
    jobs.start(parent, asdict(job), jobs.runner_command(), {})
    servers = RunningServers(parent / job.name)
    try:
        wait_until_ready(servers, config.replicas, seconds)
        yield servers
    finally:
        jobs.cancel(parent, job.name)


def wait_until_ready(servers: RunningServers, count: int, seconds: float = START_SECONDS) -> None:
    end = time.monotonic() + seconds
    fleet = SupervisedServers(servers.directory)
    while time.monotonic() < end:
        if jobs.poll(servers.directory.parent, servers.directory.name)["state"] != "running":
            break
        if (servers.directory / "servers.json").exists():
            ready = fleet.ready()
            if len(ready.replicas) >= count and (count == 1 or ready.router):
                return
        time.sleep(0.2)
    raise TimeoutError(f"no servers after {seconds} s:\n{servers.log()[-3000:]}")
