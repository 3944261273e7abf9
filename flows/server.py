"""The Prefect server a run reports to: the configured one, that of `rollouts up`, or a temporary one that lives as long
as the run.

Decision: the temporary server is started here and not by Prefect, whose own outlives a flow that is killed. This one
ends with the process that started it, and is started again should it be killed (see `supervisor`).
"""

import atexit
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_HOME,
    temporary_settings,
)

from flows import supervisor
from flows.found_server import find_server
from flows.preflight import check_server
from rollouts_core.errors import BadInput, RolloutsError
from rollouts_core.observe.served import PAGES

START_DEADLINE = 120.0
STOP_DEADLINE = 10.0


def begin_server(outputs: Path | None = None) -> Callable[[], None]:
    """Prefect has a server from here on; it can be used when what is returned has been called, which waits for it.
    Meanwhile there is much to import. Raises `BadInput` when the configured one does not answer.

    `outputs`: of the run, which links to its pages where `up` serves that directory.

    A temporary one ends with the interpreter, after Prefect has sent it the last of its logs and events.
    """
    configured = PREFECT_API_URL.value()
    if configured:
        check_server(configured)
        return lambda: None
    until_exit = ExitStack()
    atexit.register(until_exit.close)
    if (found := find_server()) and _answers(found.api):
        if outputs is not None and found.outputs == str(outputs.resolve()):
            os.environ.setdefault(PAGES, found.pages)
        until_exit.enter_context(temporary_settings({PREFECT_API_URL: found.api}))
        return lambda: None
    home = Path(PREFECT_HOME.value())
    home.mkdir(parents=True, exist_ok=True)
    log = until_exit.enter_context((home / "rollouts-server.log").open("w"))
    port = free_port()
    server = _start(port, log.fileno())
    until_exit.callback(stop, server)
    url = f"http://127.0.0.1:{port}/api"
    settings = {PREFECT_API_URL: url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}  # nobody here looks for lost runs
    until_exit.enter_context(temporary_settings(settings))
    return partial(wait_until_healthy, url, server, log.name)


def _answers(url: str) -> bool:
    try:
        check_server(url)
    except BadInput:
        return False
    return True


def _start(port: int, log: int) -> "subprocess.Popen[bytes]":
    serve = ["-m", "prefect", "server", "start", "--no-services", "--host", "127.0.0.1", "--port", str(port)]
    return subprocess.Popen(
        [sys.executable, supervisor.__file__, str(os.getpid()), sys.executable, *serve],
        env={**os.environ, "PREFECT_SERVER_UI_ENABLED": "0"},
        stdout=log,
        stderr=log,
    )


def stop(server: "subprocess.Popen[bytes]") -> None:
    server.terminate()
    try:
        server.wait(STOP_DEADLINE)
    except subprocess.TimeoutExpired:
        server.kill()


def wait_until_healthy(url: str, server: "subprocess.Popen[bytes]", log: str) -> None:
    end = time.monotonic() + START_DEADLINE
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RolloutsError(f"the Prefect server ended with status {server.returncode}; its log: {log}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    raise RolloutsError(f"the Prefect server did not answer within {START_DEADLINE:.0f} s; its log: {log}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
