"""`rollouts up`: a Prefect server, a worker and the pages of runs, in the foreground, for as long as it runs.

Decision: all three are processes that the kernel ends with this one, in whatever way it ends (see `supervisor`); none
is left behind. Each is a process group of its own, so that a terminal's Ctrl-C reaches only this process, which ends
the runs while the server still answers. Everything listens only on this machine. The server keeps its data in Prefect's
own home, so runs, schedules and logs are there again the next time.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

from flows import supervisor
from flows.deployments import POOL, deployments_of, read_configs, register, write_prefect_yaml
from flows.found_server import UpServer, announced
from flows.preflight import outputs_of, store_of
from flows.temporary_server import stop, wait_until_healthy
from flows.worker_runs import cancel_runs, tell_lost_runs
from infra.host.system import free_port
from rollouts_core.errors import BadInput, RolloutsError
from rollouts_core.observe.served import PAGES
from tasks.pages import write_list

LOOK_SECONDS = 0.5
LOOPBACK = ("--host", "127.0.0.1")
WORKER = ("-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process", "--name", "rollouts-up")


def up_command(options: argparse.Namespace) -> int:
    """Returns when it is told to end, by Ctrl-C or SIGTERM, or when one of its processes has ended by itself."""
    configs = read_configs(options.configs.resolve(), options.store)
    folder = options.configs.resolve().parent
    _refuse_taken(options.port)
    url, pages_port = f"http://127.0.0.1:{options.port}", free_port()
    pages = f"http://127.0.0.1:{pages_port}"
    for told_to_end in (signal.SIGINT, signal.SIGTERM):
        signal.signal(told_to_end, _interrupt)
    logs = Path(PREFECT_HOME.value()) / "rollouts-up"
    logs.mkdir(parents=True, exist_ok=True)
    outputs = outputs_of(next(iter(configs.values())))
    outputs.mkdir(parents=True, exist_ok=True)
    write_list(store_of(next(iter(configs.values()))), outputs)
    environment = {**os.environ, **_settings(url), PAGES: pages}
    environment.pop("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", None)  # of this command; the logs of these are files
    with ExitStack() as running:
        start = _Starter(running, logs, environment)
        server = start("server", "-m", "prefect", "server", "start", *LOOPBACK, "--port", str(options.port))
        wait_until_healthy(f"{url}/api", server, str(logs / "server.log"))
        start("pages", "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(outputs), str(pages_port))
        running.enter_context(temporary_settings({PREFECT_API_URL: f"{url}/api"}))
        deployments = deployments_of(configs, folder)
        write_prefect_yaml(deployments, folder)
        register(deployments)
        tell_lost_runs()
        try:
            start("worker", *WORKER)
            running.enter_context(announced(UpServer(f"{url}/api", pages, str(outputs.resolve()))))
            _say(options, url, pages, list(configs), logs)
            return start.wait()
        finally:
            if server.poll() is None:
                cancel_runs()


class _Starter:
    """Starts processes that end with this one, and waits for the first of them to end."""

    def __init__(self, running: ExitStack, logs: Path, environment: dict[str, str]) -> None:
        self._running, self._logs, self._environment = running, logs, environment
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def __call__(self, name: str, *arguments: str) -> "subprocess.Popen[bytes]":
        log = self._running.enter_context((self._logs / f"{name}.log").open("w"))
        command = [sys.executable, supervisor.__file__, str(os.getpid()), sys.executable, *arguments]
        process = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log, process_group=0)
        self._running.callback(stop, process)
        self._started[name] = process
        return process

    def wait(self) -> NoReturn:
        while True:
            for name, process in self._started.items():
                if process.poll() is not None:
                    raise RolloutsError(f"the {name} has ended; its log: {self._logs / f'{name}.log'}")
            time.sleep(LOOK_SECONDS)


def _settings(url: str) -> dict[str, str]:
    """Settings of the server and the worker, where they are not set already."""
    wanted = {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "3",
    }
    told = {name: os.environ.get(name, value) for name, value in wanted.items()}
    here = {"PREFECT_API_URL": f"{url}/api", "PREFECT_SERVER_UI_API_URL": f"{url}/api"}
    machines = {"PREFECT_LOGGING_EXTRA_LOGGERS": "rollouts.machines", supervisor.UNDER_UP: "1"}
    return {**told, **here, **machines, "PREFECT_WORKER_ENABLE_CANCELLATION": "true"}


def _refuse_taken(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise BadInput(
                f"something listens on port {port} already: if it is a Prefect server, `PREFECT_API_URL="
                f"http://127.0.0.1:{port}/api rollouts deploy` registers there; or take another port with --port"
            ) from None


def _say(options: argparse.Namespace, url: str, pages: str, configs: list[str], logs: Path) -> None:
    if options.json:
        print(json.dumps({"url": url, "pages": pages, "deployments": configs}), flush=True)
        return
    print(f"Prefect's UI      {url}/deployments")
    print(f"reports           {pages}")
    print(f"deployments       {', '.join([*configs, 'evaluate', 'gc'])}")
    print(f"logs              {logs}")
    print("Ctrl-C ends all of it, and the runs under way with it; finished stages stay cached.", flush=True)


def _interrupt(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt
