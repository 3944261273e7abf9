"""What tests share: a small addition task on disk, its config, one Prefect server, and the command line."""

import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from infra.host.system import free_port
from rollouts_core.config.loading import from_data
from rollouts_core.observe.run_records import RunRecord
from rollouts_core.observe.runs import RunLog
from tests.addition import MODEL, PROBLEMS, write_addition
from tests.cluster import Cluster, cluster_impossible, running_cluster
from tests.hosts import HostMachine, hosts_impossible, three_running, write_inventory

os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
os.environ |= {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests-secret", "AWS_DEFAULT_REGION": "us-east-1"}
os.environ["HF_HUB_OFFLINE"] = "1"
CACHES = tempfile.mkdtemp(prefix="rollouts-tests-cache-")
os.environ["XDG_CACHE_HOME"] = CACHES
os.environ["MKL_CBWR"] = "AUTO"  # as in jobs
os.environ["OMP_NUM_THREADS"] = "1"  # models this small gain nothing from a second thread
SERVER_DEADLINE = 120.0
COMMAND_DEADLINE = 300.0
UNTIL_SECONDS = 240.0


def pytest_unconfigure() -> None:
    shutil.rmtree(CACHES, ignore_errors=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI nothing may be skipped but what needs a GPU."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:  # a worker: its reports are judged where they are gathered
        return
    skipped = [report for report in reporter.stats.get("skipped", []) if "gpu" not in report.keywords]
    if skipped and os.environ.get("ROLLOUTS_CI"):
        reporter.write_line(f"\nfailed: {len(skipped)} tests were skipped, and in CI only a missing GPU excuses that")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def _no_store_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLOUTS_STORE", raising=False)


@pytest.fixture(scope="session")
def addition(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums of one-digit numbers as demonstrations.jsonl, prompts.jsonl and heldout.jsonl."""
    directory = tmp_path_factory.mktemp("addition")
    training, heldout = PROBLEMS[::2], PROBLEMS[1::4]
    write_addition(directory, {"demonstrations": training, "prompts": training, "heldout": heldout})
    return directory


@pytest.fixture
def small_config(addition: Path) -> dict[str, Any]:
    """A config, as data, whose whole chain takes seconds of compute."""
    return {
        "name": "small",
        "model": dict(MODEL),
        "data": {
            "demonstrations": {"kind": "jsonl", "path": str(addition / "demonstrations.jsonl")},
            "prompts": {"kind": "jsonl", "path": str(addition / "prompts.jsonl")},
            "heldout": {"kind": "jsonl", "path": str(addition / "heldout.jsonl")},
            "max_length": 12,
        },
        "sft": {"steps": 200, "batch_size": 8, "learning_rate": 0.003, "warmup_steps": 2, "checkpoint_every": 20},
        "rl": {
            "steps": 4,
            "steps_per_segment": 2,
            "batch_size": 4,
            "n_samples_per_prompt": 4,
            "learning_rate": 0.001,
            "max_new_tokens": 3,
            "checkpoint_every": 1,
        },
        "evaluation": {"max_new_tokens": 3},
    }


@pytest.fixture
def config_file(small_config: dict[str, Any], tmp_path: Path) -> Callable[..., Path]:
    """Write the small config, some parts changed, and return its path."""

    def write(**parts: Any) -> Path:
        data = {**small_config, **{name: _merged(small_config.get(name), part) for name, part in parts.items()}}
        path = tmp_path / "config.json"
        path.write_text(json.dumps(data))
        return path

    return write


@pytest.fixture
def pipeline_config(small_config: dict[str, Any]) -> Any:
    return from_data(small_config)


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Prefect server; yields its API URL."""
    home = tmp_path_factory.mktemp("prefect")
    port = free_port()
    environment = {**os.environ, "PREFECT_HOME": str(home), "PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (home / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        wait_until_healthy(environment["PREFECT_API_URL"], server)
        yield environment["PREFECT_API_URL"]
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """An S3-compatible server; yields its address, which the environment names as well, with a key for it."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ["AWS_ENDPOINT_URL"] = f"http://{host}:{port}"
    try:
        yield os.environ["AWS_ENDPOINT_URL"]
    finally:
        server.stop()


@pytest.fixture
def s3_url(s3_server: str) -> str:
    """An empty bucket."""
    import fsspec

    bucket = f"bucket-{secrets.token_hex(4)}"
    fsspec.filesystem("s3").mkdir(bucket)
    return f"s3://{bucket}/store"


@pytest.fixture(scope="session")
def running_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HostMachine, ...]]:
    if why := hosts_impossible():
        pytest.skip(why)
    with three_running(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@pytest.fixture
def three_hosts(
    running_hosts: tuple[HostMachine, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[HostMachine, ...]]:
    """Three hosts, reachable, each with an empty work directory and one GPU in the inventory; their Python is ours."""
    monkeypatch.setenv("ROLLOUTS_MACHINES", str(tmp_path / "machines.toml"))
    clean = tuple(replace(host, work=tmp_path / f"work-{host.name}") for host in running_hosts)
    write_inventory(tmp_path / "machines.toml", *clean)
    yield clean
    for host in clean:
        host.mend()
        host.restart()


@pytest.fixture
def cluster(three_hosts: tuple[HostMachine, ...], tmp_path: Path) -> Iterator[Cluster]:
    """A Slurm cluster behind host-a, which the inventory calls `cluster`."""
    if why := cluster_impossible():
        pytest.skip(why)
    write_cluster(three_hosts[0], tmp_path / "machines.toml")
    with running_cluster(three_hosts[0]) as running:
        yield running


def write_cluster(host: HostMachine, inventory: Path) -> None:
    table = host.table(gpus=2).replace(f"[{host.name}]", "[cluster]")
    inventory.write_text(f'{table}[cluster.slurm]\npartition = "gpu"\nsignal_seconds = 20\n')


@pytest.fixture
def hosts(three_hosts: tuple[HostMachine, ...], tmp_path: Path) -> tuple[HostMachine, HostMachine]:
    """The first two, and no other in the inventory."""
    write_inventory(tmp_path / "machines.toml", *three_hosts[:2])
    return three_hosts[0], three_hosts[1]


@pytest.fixture
def run_log(tmp_path: Path) -> Iterator[RunLog]:
    """The record of a run of nothing, whose jobs end with the test."""
    (tmp_path / "run").mkdir()
    log = RunLog(tmp_path / "run", RunRecord("a-run", "a run", "Running", "", 0.0, None, ()), None)
    with log.endings:
        yield log


@pytest.fixture
def command_environment(prefect_server: str, tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "PREFECT_API_URL": prefect_server, "PREFECT_HOME": str(tmp_path / "prefect-home")}


@pytest.fixture
def rollouts(command_environment: dict[str, str], tmp_path: Path) -> Callable[..., Done]:
    """Run the command line in an empty directory, with the store at `.rollouts` there."""

    def run(*arguments: str | Path, **environment: str) -> Done:
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", *map(str, arguments)],
            env={**command_environment, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=COMMAND_DEADLINE,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run


def until(condition: Callable[[], Any], what: str, seconds: float = UNTIL_SECONDS) -> Any:
    """What the condition comes to, once it comes to something."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"waited too long for {what}"
        time.sleep(0.1)
    return found


def job_process(directory: Path) -> int:
    """The process that was given this directory as its argument, the runner apart."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"rollouts_core.stages.job" in arguments and str(directory).encode() in arguments:
                return int(entry.name)
    raise AssertionError(f"no process works in {directory}")


def _merged(base: Any, change: Any) -> Any:
    return {**base, **change} if isinstance(base, dict) and isinstance(change, dict) else change


def wait_until_healthy(url: str, server: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + SERVER_DEADLINE
    while time.monotonic() < end:
        assert server.poll() is None, "the Prefect server ended at its start"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"no Prefect server at {url} after {SERVER_DEADLINE} s")
