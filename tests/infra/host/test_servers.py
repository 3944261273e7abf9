"""What keeps inference servers alive, on small web servers that can be told to misbehave."""

import contextlib
import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infra.host import jobs, servers
from rollouts_core.errors import EngineUnavailable
from rollouts_core.inference.replicas import Replica, SupervisedServers
from tests.answering import SSH, answering, ok

DEADLINE = 30.0
SERVER = """
import http.server, os, pathlib, subprocess, sys, time
port, mood = int(sys.argv[1]), pathlib.Path(sys.argv[2])
if mood.exists() and mood.read_text() == "dies":
    print("torch.OutOfMemoryError: no memory left for the cache", flush=True)
    sys.exit(3)
child = subprocess.Popen(["sleep", "1000"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if mood.exists() and mood.read_text() == "hangs":
            time.sleep(1000)
        self.send_response(200); self.end_headers()
        self.wfile.write(f"{os.getpid()} {child.pid}".encode())
    def log_message(self, *arguments): pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@dataclass(frozen=True)
class Kept:
    """Servers that are kept, and their moods."""

    parent: Path
    name: str = "serve-test"

    @property
    def directory(self) -> Path:
        return self.parent / self.name

    @property
    def fleet(self) -> SupervisedServers:
        return SupervisedServers(self.directory)

    def mood(self, number: int, mood: str) -> None:
        file = self.parent / f"mood-{number}"
        file.write_text(mood)

    def replicas(self) -> dict[str, Replica]:
        return {replica.name: replica for replica in self.fleet.ready().replicas}

    def log(self) -> str:
        return (self.directory / "log").read_text()

    def pids(self, replica: Replica) -> list[int]:
        """The server's process and its child."""
        with urllib.request.urlopen(replica.url, timeout=5) as answer:
            return [int(word) for word in answer.read().split()]


@contextmanager
def kept(tmp_path: Path, count: int = 1, **changes: Any) -> Iterator[Kept]:
    (tmp_path / "server.py").write_text(SERVER)
    spec = {
        "replicas": [
            {
                "name": f"replica-{number}",
                "command": [sys.executable, str(tmp_path / "server.py"), "{port}", str(tmp_path / f"mood-{number}")],
                "environment": {},
                "devices": [],
                "ready": "/",
                "probe": "/",
            }
            for number in range(count)
        ],
        "router": None,
        "start_seconds": 20.0,
        "hang_seconds": 1.0,
        "restarts": 2,
        "memory": str(tmp_path / "memory.x"),
        **changes,
    }
    job = {
        "name": "serve-test",
        "command": [sys.executable, "-m", "infra.host.servers", "{directory}"],
        "spec": spec,
        "time_limit": 600.0,
        "unattended_limit": changes.pop("unattended_limit", 600.0),
        "stall_limit": 600.0,
    }
    jobs.start(tmp_path, job, jobs.runner_command(), {})
    try:
        yield Kept(tmp_path)
    finally:
        jobs.cancel(tmp_path, "serve-test")


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        with contextlib.suppress(OSError, EngineUnavailable):
            if condition():
                return
        time.sleep(0.05)
    raise AssertionError("it did not come to that")


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_servers_answer_at_ports_of_their_own_and_end_with_their_job(tmp_path: Path) -> None:
    with kept(tmp_path, 2) as those:
        until(lambda: len(those.replicas()) == 2)
        urls = {replica.url for replica in those.replicas().values()}
        pids = [pid for replica in those.replicas().values() for pid in those.pids(replica)]
        assert len(urls) == 2 and all(map(is_alive, pids))
        assert (tmp_path / "memory.x" / "lock").exists()
    until(lambda: not any(map(is_alive, pids)))
    assert not (tmp_path / "memory.x").exists()


@pytest.mark.parametrize("how", ["killed", "paused", "hangs"])
def test_a_server_that_is_gone_or_hangs_is_started_again_elsewhere(tmp_path: Path, how: str) -> None:
    with kept(tmp_path, 2) as those:
        until(lambda: len(those.replicas()) == 2)
        before = those.replicas()
        pids = those.pids(before["replica-0"])
        if how == "killed":
            os.kill(pids[0], signal.SIGKILL)
        elif how == "paused":
            os.kill(pids[0], signal.SIGSTOP)
        else:
            those.mood(0, "hangs")
            until(lambda: "replica-0" not in those.replicas())
            those.mood(0, "well")
        until(lambda: those.replicas().get("replica-0", before["replica-0"]) != before["replica-0"])
        assert those.replicas()["replica-1"] == before["replica-1"], "the other one is left alone"
        until(lambda: not any(map(is_alive, pids)))


def test_a_server_that_is_complained_about_is_started_again_once(tmp_path: Path) -> None:
    with kept(tmp_path) as those:
        until(those.replicas)
        before = those.replicas()["replica-0"]
        those.fleet.restart(before, "has weight version 3 instead of 4")
        until(lambda: those.replicas().get("replica-0", before) != before)
        after = those.replicas()["replica-0"]
        those.fleet.restart(before, "an old complaint")
        until(lambda: not list((those.directory / "restarts").iterdir()))
        assert those.replicas()["replica-0"] == after
        assert "has weight version 3 instead of 4" in those.log()


def test_a_server_that_cannot_start_ends_all_with_its_own_last_lines(tmp_path: Path) -> None:
    (tmp_path / "mood-1").write_text("dies")
    with kept(tmp_path, 2) as those:
        until(lambda: jobs.poll(tmp_path, those.name)["state"] == "finished")
        message = jobs.poll(tmp_path, those.name)["message"]
        assert message.startswith("replica-1 ended with exit status 3 before it answered, 2 times in a row")
        assert "torch.OutOfMemoryError: no memory left for the cache" in message
        with pytest.raises(EngineUnavailable, match="OutOfMemoryError"):
            those.fleet.ready()


def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "mood-0").write_text("hangs")
    with kept(tmp_path, start_seconds=1.0) as those:
        until(lambda: jobs.poll(tmp_path, those.name)["state"] == "finished")
        assert "did not answer within 1 s" in jobs.poll(tmp_path, those.name)["message"]


@pytest.mark.parametrize(
    ("said", "expected"),
    [(ok(b""), True), (SSH, False), (b"", False), (b"HTTP/1.0 301 Moved\r\nLocation: http://[\r\n\r\n", False)],
)
def test_another_program_at_the_port_is_no_answer(said: bytes, expected: bool) -> None:
    with answering(said) as url:
        assert servers.answers(url, 5.0) is expected


@pytest.mark.slow
def test_a_port_that_was_taken_meanwhile_costs_one_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between choosing and binding, somebody else has it."""
    import asyncio
    import socket

    with socket.socket() as somebody:
        somebody.bind(("127.0.0.1", 0))
        somebody.listen()
        ports = [somebody.getsockname()[1], servers.free_port()]
        monkeypatch.setattr(servers, "free_port", lambda: ports.pop(0) if len(ports) > 1 else ports[0])
        monkeypatch.setattr(servers, "end_with_parent", lambda: None)
        (tmp_path / "server.py").write_text(SERVER)
        command = [sys.executable, str(tmp_path / "server.py"), "{port}", str(tmp_path / "mood")]
        entry = {
            "name": "one", "command": command, "environment": {}, "devices": [], "ready": "/", "probe": "/",
        }  # fmt: skip
        server = servers.Server(entry)

        async def started() -> None:
            spec = {"start_seconds": 20.0, "hang_seconds": 5.0, "restarts": 3}
            keeping = asyncio.create_task(servers._keep(server, spec, tmp_path / "restart", lambda: None))
            while server.state != "ready":
                await asyncio.sleep(0.05)
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

        asyncio.run(asyncio.wait_for(started(), DEADLINE))
        assert server.starts == 2


@pytest.mark.parametrize("victim", ["keeper", "runner"])
def test_servers_go_with_whoever_keeps_them(tmp_path: Path, victim: str) -> None:
    with kept(tmp_path) as those:
        until(those.replicas)
        pids = those.pids(those.replicas()["replica-0"])
        keeper = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
        runner = int(Path(f"/proc/{keeper}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(keeper if victim == "keeper" else runner, signal.SIGKILL)
        until(lambda: not is_alive(pids[0]))
        if victim == "keeper":
            until(lambda: not is_alive(pids[1]))
        else:
            os.kill(pids[1], signal.SIGKILL)  # the kernel ends a child, not a child's child


def test_servers_that_nobody_wants_end(tmp_path: Path) -> None:
    with kept(tmp_path, unattended_limit=1.5) as those:
        until(lambda: (those.directory / "status.json").exists())
        assert json.loads((those.directory / "status.json").read_text())["reason"] == "unattended"


def test_memory_of_dead_owners_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / "memory.dead").mkdir()
    (tmp_path / "memory.dead" / "lock").touch()
    (tmp_path / "memory.dead" / "weights").write_text("of nobody")
    with kept(tmp_path) as those:
        until(those.replicas)
        assert not (tmp_path / "memory.dead").exists()


@pytest.mark.parametrize("trap", ["others may write", "a link"])
def test_memory_that_somebody_else_has_prepared_is_refused(tmp_path: Path, trap: str) -> None:
    """Its name can be guessed, and it lies where every user of the machine may write."""
    (tmp_path / "theirs").mkdir(mode=0o700)
    if trap == "a link":
        (tmp_path / "memory.x").symlink_to(tmp_path / "theirs")
    else:
        (tmp_path / "memory.x").mkdir()
        (tmp_path / "memory.x").chmod(0o777)
    with kept(tmp_path) as those:
        until(lambda: (those.directory / "status.json").exists())
        assert "is another user's, or others may write there" in (those.directory / "failure.json").read_text()
    assert not list((tmp_path / "theirs").iterdir())
