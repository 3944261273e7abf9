"""What a Slurm cluster is: reported as its commands tell it, judged by whoever asks."""

import json
import os
import secrets
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.host import slurm

PROBE_SECONDS = 20
"""How long a node may be waited for."""
FIELDS = "partition,state,limit,nodes,gres"
PROBE = """
import json, os, shutil, socket, sys
try:
    socket.create_connection(("pypi.org", 443), 3).close()
    network = True
except OSError:
    network = False
print(json.dumps({"node": os.environ.get("SLURMD_NODENAME", ""), "python": sys.version.split()[0],
    "sees": os.path.exists(sys.argv[1]), "network": network, "apptainer": bool(shutil.which("apptainer"))}))
"""


def cluster(work: Path, partition: str | None, options: Sequence[str], python: str) -> dict[str, Any]:
    """`version`; `partitions` (name, state, limit, nodes, gres); `accounts` with their QOS, None where there is no
    accounting; `node`: what a node of the partition is like, with `error` where none was free. Or `error` alone."""
    try:
        version = slurm.asked(["sinfo", "--version"]).split()[-1]
        rows = slurm.asked(["sinfo", "-h", "-o", "%P|%a|%l|%D|%G"]).splitlines()
    except (slurm.Away, slurm.Refused) as error:
        return {"error": str(error)}
    partitions = [dict(zip(FIELDS.split(","), row.split("|"), strict=False)) for row in rows]
    return {
        "version": version,
        "partitions": partitions,
        "accounts": _accounts(),
        "node": _probed(work, partition, options, python),
    }


def _accounts() -> list[str] | None:
    user = os.environ.get("USER") or os.environ.get("LOGNAME") or str(os.getuid())
    try:
        rows = slurm.asked(["sacctmgr", "-n", "-P", "show", "assoc", f"user={user}", "format=account,partition,qos"])
    except (slurm.Away, slurm.Refused):
        return None
    return rows.split()


def _probed(work: Path, partition: str | None, options: Sequence[str], python: str) -> dict[str, Any]:
    seen = work / f"probe-{secrets.token_hex(4)}"
    seen.touch()
    chosen = [f"--partition={partition}"] if partition else []
    step = ["srun", "--quiet", f"--immediate={PROBE_SECONDS}", "--time=1", "--ntasks=1", f"--chdir={work}", *chosen]
    try:
        done = subprocess.run(
            [*step, *options, python, "-c", PROBE, str(seen)], capture_output=True, text=True,
            timeout=PROBE_SECONDS + slurm.DEADLINE,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"error": f"no node was free within {PROBE_SECONDS} s"}
    except ValueError:
        said = [line.partition("error: ")[2] or line for line in done.stderr.strip().splitlines()]
        return {"error": said[-1] if said else f"srun ended with exit status {done.returncode}"}
    finally:
        seen.unlink()
    return found
