"""What a case happens in: a directory with a config and a store, and the processes of a run in it."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollouts_core.store.leases import live_leases
from rollouts_core.store.manifest import Manifest
from rollouts_core.store.store import Store, open_store
from tests.addition import MODEL, PROBLEMS, write_addition
from tests.rollouts_core.store.artifacts import all_manifests

STAGE_DEADLINE = 120.0
RUN_DEADLINE = 240.0
CHECKPOINT_STEPS = {"sft": 20, "rl-1": 2, "rl-2": 2}


@dataclass(frozen=True)
class World:
    """One case's own directory."""

    directory: Path
    store: Store
    environment: dict[str, str]

    @property
    def command(self) -> list[str]:
        store = self.store.url or str(self.store.home)
        return [sys.executable, "-m", "flows.cli", "run", "config.json", "--store", store, "--json"]

    def begin(self) -> "subprocess.Popen[bytes]":
        log = (self.directory / "run.log").open("ab")
        with log, (self.directory / "run.json").open("wb") as out:
            return subprocess.Popen(self.command, cwd=self.directory, env=self.environment, stdout=out, stderr=log)

    def job(self, stage: str) -> Path | None:
        """The directory of the job that makes the stage, once it has begun."""
        prefix = stage.partition("-")[0]
        found = [path for path in (self.store.home / "jobs").glob(f"{prefix}-*") if (path / "attempt.json").exists()]
        return found[0] if found else None

    def processes(self, word: str) -> list[int]:
        """Those of this world whose command line has the word."""
        return [pid for pid, line in command_lines() if word in line and str(self.directory) in line]

    def manifests(self) -> dict[str, Manifest]:
        return {manifest.artifact.stage: manifest for manifest in all_manifests(self.store)}


def write_config(directory: Path, data: Path, evaluated: bool) -> None:
    sources = {name: {"kind": "jsonl", "path": str(data / f"{name}.jsonl")} for name in ("demonstrations", "prompts")}
    heldout = {"kind": "jsonl", "path": str(data / "heldout.jsonl")} if evaluated else None
    sft = {"steps": 400, "batch_size": 8, "learning_rate": 0.003, "log_every": 1, "checkpoint_every": 20}
    rl = {"steps": 16, "steps_per_segment": 8, "batch_size": 8, "n_samples_per_prompt": 8, "checkpoint_every": 2}
    config = {
        "name": "faults",
        "model": MODEL,
        "data": {**sources, "heldout": heldout, "max_length": 12},
        "sft": sft,
        "rl": {**rl, "learning_rate": 0.001, "max_new_tokens": 3},
        "evaluation": {"max_new_tokens": 3},
    }
    (directory / "config.json").write_text(json.dumps(config))


def write_data(directory: Path) -> None:
    """Every problem many times over, so that tokenizing them takes a moment."""
    write_addition(directory, {"demonstrations": PROBLEMS * 60, "prompts": PROBLEMS * 60, "heldout": PROBLEMS})


def content(manifest: Manifest) -> dict[str, str]:
    """Everything that must not differ: file to digest, measured times left out."""
    return {entry.path: entry.sha256 for entry in manifest.files if not entry.path.endswith("metrics.jsonl")}


def link_stages(reference: World, world: World, names: list[str]) -> None:
    """Give a world the finished stages of the reference."""
    for name in names:
        artifact = reference.manifests()[name].artifact
        source = reference.store.home / "artifacts" / artifact.directory
        target = world.store.home / "artifacts" / artifact.directory
        same_disk = source.stat().st_dev == world.store.home.parent.stat().st_dev
        shutil.copytree(source, target, copy_function=os.link if same_disk else shutil.copy2)


def lost_steps(world: World) -> dict[str, int]:
    """Per stage, the most steps that one resumption trained again."""
    lost: dict[str, int] = {}
    for path in (world.store.home / "jobs").glob("*/metrics.jsonl"):
        last: dict[str, int] = {}
        for line in path.read_text().splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            stage = record["stage"]
            if stage not in CHECKPOINT_STEPS or "done" not in record:  # samples of a step have a record of their own
                continue
            done = record["done"]
            lost[stage] = max(lost.get(stage, 0), last.get(stage, 0) - done + 1 if stage in last else 0)
            last[stage] = done
    return lost


def leftovers(world: World) -> list[str]:
    """What should have gone with its owner."""
    found = [f"process {line}" for _, line in command_lines() if str(world.directory) in line]
    found += [f"lease {name}" for name in live_leases(world.store.objects)]
    for folder in ("staging", "work"):
        directory = world.store.home / folder
        found += [f"{folder}/{path.name}" for path in directory.iterdir()] if directory.is_dir() else []
    found += [str(path) for path in world.directory.rglob("*.unfinished")]
    return found


def command_lines() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if line and state != "Z":
                yield int(entry.name), line


def wait_for(condition: Callable[[], Any], deadline: float, what: str) -> Any:
    end = time.monotonic() + deadline
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"waited {deadline:.0f} s for {what}")
        time.sleep(0.02)
    return found


class Wire:
    """A port that forwards to another, and can be cut."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self.cut = False
        threading.Thread(target=self._accept, daemon=True).start()

    def break_off(self) -> None:
        self.cut = True
        for connection in self._open:
            connection.close()
        self._open.clear()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            if self.cut:
                near.close()
                continue
            far = socket.create_connection(self._target)
            self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
    except OSError:
        pass
    finally:
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


@contextmanager
def small_disk(directory: Path, megabytes: int) -> Iterator[Path]:
    """A file system of its own; needs root."""
    directory.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(directory)], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def open_world(directory: Path, environment: dict[str, str], home: Path | None = None, url: str | None = None) -> World:
    return World(directory, open_store(home or directory / "store", url), environment)
