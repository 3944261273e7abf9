"""What `watch` shows of a run whose replicas are on other machines."""

from typing import Any

from rich.console import Console

from flows.watching import _page, _Seen
from rollouts_core.observe.run_records import RunRecord

STEP = {"stage": "rl-1", "step": 3, "done": 3, "total": 9, "weight_version": 2.0}
STARTED = "2026-01-01T00:00:00+00:00"
RATE = {"replicas/host-b:replica-0/tokens_per_second": 120.0}


def replica(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "state": "ready", "since": 0.0, "starts": 1, **more}


def test_each_replica_is_told_once_as_the_trainer_knows_it() -> None:
    """The job on the host tells of it too, by another name; a job of servers has no stage."""
    seen = _Seen()
    seen.take(("host-b", "serve-rl-1"), {"ready": 1, "of": 1, "replicas": [replica("replica-0")]})
    told = {"ready": 1, "of": 1, "replicas": [replica("host-b:replica-0", machine="host-b")]}
    seen.take(("local", "serve-rl-1"), told)
    seen.take(("local", "rl-1"), {**STEP, **RATE})
    console = Console(width=140)
    with console.capture() as captured:
        console.print(_page(RunRecord("a-run", "a run", "Running", STARTED, 0.0, None, ()), seen))
    (line,) = [line for line in captured.get().splitlines() if "replica-0" in line]
    assert line.split()[:2] == ["host-b:replica-0", "serves"] and "version 2" in line and "120" in line
