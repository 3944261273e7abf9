"""The kill matrix: `python -m tests.faults.matrix [CASES]`, or `make faults`.

In each seeded case a run of the whole chain is disturbed once, then the same command is given again, as a user would,
until the run completes. The artifacts must then equal those of an undisturbed run. Exit status 0 only when all cases
recovered, with the same bits, no more steps lost than a checkpoint interval has (two where the checkpoint itself could
not be written), and nothing left behind.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from infra.host.system import free_port
from rollouts_core.errors import RolloutsError
from rollouts_core.store.objects import S3_SETTINGS
from tests.conftest import wait_until_healthy
from tests.faults.cases import Case, cases
from tests.faults.inflict import inflict
from tests.faults.world import (
    CHECKPOINT_STEPS,
    RUN_DEADLINE,
    STAGE_DEADLINE,
    Wire,
    World,
    content,
    leftovers,
    link_stages,
    lost_steps,
    open_world,
    small_disk,
    wait_for,
    write_config,
    write_data,
)

ATTEMPTS = 4
NOT_WRITTEN = ("disk full", "store read-only")
"""Faults under which a checkpoint can't be written. Training goes on until the next is due, so more steps are lost."""
TOGETHER = 2
DISK_MEGABYTES = 400
TIMED = ("bootstrap", "report")
"""Artifacts that hold measured times."""
BEFORE = {
    "tokenize": [],
    "sft": ["tokenize"],
    "rl-1": ["tokenize", "sft"],
    "rl-2": ["tokenize", "sft"],
    "evaluate-sft": ["tokenize", "sft", "rl-1", "rl-2"],
}
"""The stages that a case begins with, so that it need not make them."""


@dataclass(frozen=True)
class Outcome:
    case: Case
    hit: str
    """Empty where the run had ended before it could be disturbed."""
    commands: int
    """How often the command was given."""
    seconds: float
    """From the fault to the run's completion."""
    lost: dict[str, int]
    """Stage to the most steps that were trained again."""
    same: bool
    left: list[str]
    problem: str = ""

    @property
    def recovered(self) -> bool:
        intervals = 2 if self.case.fault in NOT_WRITTEN else 1
        within = all(steps <= intervals * CHECKPOINT_STEPS[stage] for stage, steps in self.lost.items())
        return not self.problem and self.same and within and not self.left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=int, nargs="?", default=100)
    parser.add_argument("--only", type=int, action="append", help="the number of a case")
    parser.add_argument("--out", type=Path, help="write the outcomes as JSON lines")
    options = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("mounting the small disks takes root")
    chosen = [case for case in cases(options.cases) if not options.only or case.number in options.only]
    with ExitStack() as stack:
        root = Path(tempfile.mkdtemp(prefix="rollouts-faults-"))
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        matrix = Matrix(root, stack.enter_context(_prefect_server(root)), stack.enter_context(_s3_server()))
        print("| case | fault | hit in | recovered in, s | commands | steps lost | same bits | left behind | |")
        print("|---|---|---|---|---|---|---|---|---|", flush=True)
        with ThreadPoolExecutor(TOGETHER) as pool:
            outcomes = []
            for outcome in pool.map(matrix.run, chosen):
                print(_row(outcome), flush=True)
                outcomes.append(outcome)
    if options.out:
        options.out.write_text("".join(json.dumps(asdict(outcome)) + "\n" for outcome in outcomes))
    print(_summary(outcomes))
    return 0 if all(outcome.recovered for outcome in outcomes) else 1


class Matrix:
    """What all cases share: the data, undisturbed runs to compare with, a Prefect server."""

    def __init__(self, root: Path, server: str, s3_port: int) -> None:
        self._root, self._server, self._s3_port = root, server, s3_port
        (root / "data").mkdir()
        write_data(root / "data")
        self._references = {evaluated: self._undisturbed(evaluated) for evaluated in (False, True)}
        records = (json.loads((self._world_of(e) / "run.json").read_text()) for e in (False, True))
        self._seconds = {stage["name"]: stage["seconds"] for record in records for stage in record["stages"]}

    def run(self, case: Case) -> Outcome:
        with ExitStack() as stack:
            try:
                return self._run(case, stack)
            except (RolloutsError, OSError, subprocess.SubprocessError) as error:
                return Outcome(case, "?", 0, 0.0, {}, False, [], f"{type(error).__name__}: {error}")

    def _run(self, case: Case, stack: ExitStack) -> Outcome:
        directory = self._root / f"case-{case.number:04}"
        directory.mkdir()
        evaluated = case.stage.startswith("evaluate")
        write_config(directory, self._root / "data", evaluated)
        home, url, wire = directory / "store", None, None
        environment = self._environment(directory, own_server="Prefect" in case.fault)
        if case.fault == "disk full":
            home = stack.enter_context(small_disk(directory / "disk", DISK_MEGABYTES)) / "store"
        if case.fault == "store unreachable":
            wire, url, home = (
                Wire(("127.0.0.1", self._s3_port)),
                f"s3://case-{case.number:04}/store",
                directory / ".rollouts",
            )
            environment["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{wire.port}"
            wait_for(partial(_has_bucket, f"case-{case.number:04}"), 60.0, "a bucket")
        world = open_world(directory, environment, home, url)
        if url is None:
            link_stages(self._references[evaluated], world, ["bootstrap", *BEFORE[case.stage]])
        run = world.begin()
        hit = self._disturb(case, world, run, wire)
        began = time.monotonic()
        commands = _until_complete(world, run)
        seconds = time.monotonic() - began
        expected = {name: content(manifest) for name, manifest in self._references[evaluated].manifests().items()}
        made = {name: content(manifest) for name, manifest in world.manifests().items()}
        same = all(made.get(name) == files for name, files in expected.items() if name not in TIMED)
        left = _settled_leftovers(world)
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        return Outcome(case, hit, commands, seconds, lost_steps(world), same, left)

    def _disturb(self, case: Case, world: World, run: "subprocess.Popen[bytes]", wire: Wire | None) -> str:
        wait_for(lambda: world.job(case.stage) or run.poll() is not None, STAGE_DEADLINE, f"stage {case.stage}")
        end = time.monotonic() + case.moment * self._seconds[case.stage]
        if case.stage == "rl-2":
            end += self._seconds["rl-1"]
        while time.monotonic() < end and run.poll() is None:
            time.sleep(0.01)
        return inflict(case, world, run, wire)

    def _undisturbed(self, evaluated: bool) -> World:
        directory = self._world_of(evaluated)
        directory.mkdir()
        write_config(directory, self._root / "data", evaluated)
        world = open_world(directory, self._environment(directory, own_server=False))
        if world.begin().wait(RUN_DEADLINE):
            raise SystemExit("the undisturbed run failed:\n" + (directory / "run.log").read_text())
        return world

    def _world_of(self, evaluated: bool) -> Path:
        return self._root / f"undisturbed-{'evaluated' if evaluated else 'trained'}"

    def _environment(self, directory: Path, own_server: bool) -> dict[str, str]:
        environment = {**os.environ, "PREFECT_HOME": str(directory / "prefect"), "OMP_NUM_THREADS": "1"}
        environment.pop("PREFECT_API_URL", None)
        return environment if own_server else {**environment, "PREFECT_API_URL": self._server}


def _until_complete(world: World, run: "subprocess.Popen[bytes]") -> int:
    """Give the command again until it succeeds; returns how often it was given in all."""
    for number in range(1, ATTEMPTS + 1):
        if run.wait(RUN_DEADLINE) == 0:
            return number
        run = world.begin()
    run.kill()
    lines = (world.directory / "run.log").read_text().splitlines()[-3:]
    raise TimeoutError(f"did not complete with {ATTEMPTS} commands: {' / '.join(lines)}")


def _settled_leftovers(world: World) -> list[str]:
    """What is still there a moment after the last process of the run should have gone."""
    end = time.monotonic() + 10.0
    while (left := leftovers(world)) and time.monotonic() < end:
        time.sleep(0.2)
    return left


@contextmanager
def _prefect_server(root: Path) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    environment = {**os.environ, "PREFECT_HOME": str(root / "prefect"), "PREFECT_API_URL": url}
    command = [sys.executable, "-m", "prefect", "server", "start", "--no-services", "--port", str(port)]
    with (root / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        wait_until_healthy(url, server)
        yield url
    finally:
        server.terminate()
        server.wait(30)


@contextmanager
def _s3_server() -> Iterator[int]:
    """An S3-compatible server in a process of its own; yields its port. The environment here names it."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: _has_bucket("first"), 60.0, "the S3 server")
        yield port
    finally:
        server.kill()
        server.wait()


def _has_bucket(name: str) -> bool:
    """Make a bucket; False where nobody answers."""
    import fsspec

    try:
        fsspec.filesystem("s3", use_listings_cache=False, config_kwargs=S3_SETTINGS).mkdir(name)
    except Exception:  # whatever the client raises while the server starts
        return False
    return True


def _row(outcome: Outcome) -> str:
    case = outcome.case
    lasted = not case.fault.startswith("kill") and case.fault != "disk full"
    cells = [
        str(case.number),
        case.fault + (f", {case.outage:.1f} s" if lasted else ""),
        case.stage if outcome.hit else f"{case.stage} (had ended)",
        f"{outcome.seconds:.0f}",
        str(outcome.commands),
        ", ".join(f"{stage} {steps}" for stage, steps in outcome.lost.items() if steps) or "0",
        "yes" if outcome.same else "NO",
        ", ".join(outcome.left) or "nothing",
        outcome.problem or ("" if outcome.recovered else "NOT RECOVERED"),
    ]
    return "| " + " | ".join(cells) + " |"


def _summary(outcomes: list[Outcome]) -> str:
    recovered = sum(outcome.recovered for outcome in outcomes)
    hits = sum(bool(outcome.hit) for outcome in outcomes)
    seconds = sorted(outcome.seconds for outcome in outcomes)
    lost = max((steps for outcome in outcomes for steps in outcome.lost.values()), default=0)
    return (
        f"\n{recovered} of {len(outcomes)} recovered; {hits} were hit while they ran; "
        f"median {seconds[len(seconds) // 2]:.0f} s from fault to completion; at most {lost} steps lost"
    )


if __name__ == "__main__":
    sys.exit(main())
