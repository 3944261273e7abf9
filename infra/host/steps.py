"""Work on a node of a Slurm allocation, asked for on the login node. Each is a step of the allocation.

Decision: a request goes over the standard input of the step, so that nothing of it is written to a disk.
"""

import json
import re
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.host import slurm
from infra.host.allocated import LIVE
from infra.host.files import read_json

STEP_SECONDS = 12.0
STEPS_SECONDS = 24.0
"""After a restart, Slurm's controller refuses steps for some seconds."""
GONE = re.compile("invalid job id|completing or completed|revoked|expired|not running", re.IGNORECASE)
"""Slurm's words about a step whose allocation ends."""
LENGTH = struct.Struct(">I")


def start(root: Path, lease: str, node: int, request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Ask a node's agent to start a job. Returns its answer; None if the allocation has ended or Slurm doesn't answer.

    It does no harm to ask twice.
    """
    try:
        printed = _printed(
            root / lease, node, ["begin", str(root / lease), str(node)], json.dumps(request).encode(), STEP_SECONDS
        )
    except slurm.Away:
        return None
    except slurm.Refused as error:
        return {"error": str(error)}
    answer: dict[str, Any] = json.loads(printed)
    return answer


def ask(root: Path, lease: str, node: int, call: str, seconds: float, **arguments: Any) -> Any:
    """The answer of an agent on a node, as the login node's own gives it. Raises `slurm.Away` or `slurm.Refused`."""
    request = json.dumps({"call": call, "arguments": arguments}).encode()
    given = LENGTH.pack(len(request)) + request
    answer = json.loads(_printed(root / lease, node, ["serve", str(root.parent)], given, seconds)[LENGTH.size :])
    if "error" in answer:
        raise OSError(answer["message"])
    return answer["value"]


def _printed(directory: Path, node: int, arguments: Sequence[str], given: bytes, seconds: float) -> bytes:
    """The output of a part of the agent, run on a node. Raises `slurm.Away` if the allocation has ended or Slurm does
    not answer, `slurm.Refused` with Slurm's message if it refuses for some time."""
    told, found = read_json(directory / f"node-{node}.json"), read_json(directory / "allocation.json")
    row = slurm.look(directory.parent).rows.get(found.get("slurm", ""))
    if not told or row is None or row.state not in LIVE:
        raise slurm.Away("the allocation does not run")
    component = [f"--het-group={told['component']}"] if len(found["components"]) > 1 else []
    step = ["srun", f"--jobid={found['slurm']}", *component, "--overlap", "--nodes=1", "--ntasks=1", "--quiet",
            f"--nodelist={told['node']}", *told["agent"], *arguments]  # fmt: skip
    end = time.monotonic() + STEPS_SECONDS
    while True:
        try:
            done = subprocess.run(step, input=given, capture_output=True, timeout=seconds)
            if done.returncode == 0 and done.stdout:
                return done.stdout
            said = (done.stderr or done.stdout).decode(errors="replace").strip()
        except subprocess.TimeoutExpired:
            said = f"it did not start within {seconds:.0f} s"
        if GONE.search(said):
            raise slurm.Away(said)
        if time.monotonic() > end:
            slurm.forget(directory.parent)
            raise (slurm.Away if slurm.AWAY.search(said) else slurm.Refused)(f"a step on {told['node']} failed: {said}")
        time.sleep(1.0)
