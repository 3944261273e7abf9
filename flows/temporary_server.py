"""A Prefect server that lives as long as one command.

Decision: the server is started before anything else, since its start takes longer than everything that a run does
before it needs the server. So nothing here imports Prefect, and whether a server is needed is guessed. If Prefect's
settings turn out to name a server, this one is stopped again.

Decision: it is started here and not by Prefect, whose own temporary server outlives a flow that is killed. This one
ends with the process that started it, and is started again if it is killed (see `supervisor`). uvicorn starts it, as it
does Prefect's own temporary servers; `prefect server start` takes a second longer.
"""

import atexit
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from flows import supervisor
from flows.found_server import find_server, prefect_home
from infra.host.system import free_port
from rollouts_core.errors import RolloutsError
from rollouts_core.loopback import opened

START_DEADLINE = 120.0
STOP_DEADLINE = 10.0
APP = ("-m", "uvicorn", "--factory", "prefect.server.api.server:create_app", "--log-level", "warning")
SETTINGS = {
    "PREFECT_SERVER_UI_ENABLED": "0",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "0",
    "PREFECT__SERVER_FINAL": "1",
    "PREFECT__SERVER_WEBSERVER_ONLY": "1",
}


@dataclass(frozen=True)
class TemporaryServer:
    api: str
    process: "subprocess.Popen[bytes]"
    """The supervisor of the server."""
    log: Path
    is_first: bool
    """Whether it makes Prefect's database, which takes a while."""

    def wait(self) -> None:
        """Wait until the server answers. Raises `RolloutsError` if it has ended."""
        wait_until_healthy(self.api, self.process, str(self.log))


def start_server() -> TemporaryServer:
    """Start it. It is stopped when the interpreter ends, after Prefect has sent its last logs and events."""
    home, port = prefect_home(), free_port()
    home.mkdir(parents=True, exist_ok=True)
    is_first = not (home / "prefect.db").exists()
    path = home / "rollouts-server.log"
    command = [sys.executable, *APP, "--host", "127.0.0.1", "--port", str(port)]
    with path.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, supervisor.__file__, str(os.getpid()), *command],
            env={**os.environ, **SETTINGS}, stdout=log, stderr=log,
        )  # fmt: skip
    atexit.register(stop, process)
    return TemporaryServer(f"http://127.0.0.1:{port}/api", process, path, is_first)


def start_if_wanted() -> TemporaryServer | None:
    """Start a temporary server; None if a server is configured, or if one of `rollouts up` runs."""
    profiles = prefect_home() / "profiles.toml"
    configured = "PREFECT_API_URL" in os.environ or (profiles.is_file() and "PREFECT_API_URL" in profiles.read_text())
    return None if configured or find_server() else start_server()


def stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_DEADLINE)
    except subprocess.TimeoutExpired:
        process.kill()


def wait_until_healthy(api: str, server: "subprocess.Popen[bytes]", log: str) -> None:
    end = time.monotonic() + START_DEADLINE
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RolloutsError(f"the Prefect server ended with status {server.returncode}; its log: {log}")
        try:
            with opened(f"{api}/health", 2.0):
                return
        except OSError:
            time.sleep(0.05)
    raise RolloutsError(f"the Prefect server did not answer within {START_DEADLINE:.0f} s; its log: {log}")
