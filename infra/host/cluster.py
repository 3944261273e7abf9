"""A report of a Slurm cluster by its own commands. The caller judges it."""

import getpass
import json
import secrets
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.host import slurm

PROBE_SECONDS = 20
"""How long a node may be waited for."""
FIELDS = "partition,state,limit,nodes,gres"
ACCOUNT_FIELDS = ("account", "partition", "qos", "maxjobs", "maxsubmit", "maxwall", "maxtres", "grptres")
PROBE = """
import json, os, shutil, socket, subprocess, sys
shared, disk, programs = sys.argv[1:]
try:
    socket.create_connection(("pypi.org", 443), 3).close()
    network = True
except OSError:
    network = False
disk = os.path.expandvars(disk)
while disk and not os.path.exists(disk):
    disk = os.path.dirname(disk)
print(json.dumps({"node": os.environ.get("SLURMD_NODENAME", ""), "python": sys.version.split()[0],
    "sees": os.path.exists(shared), "network": network, "disk_free": shutil.disk_usage(disk).free if disk else None,
    "lacks": [program for program in programs.split() if not shutil.which(program)],
    "namespaces": not subprocess.call(["unshare", "--user", "--mount", "true"], stderr=subprocess.DEVNULL)}))
"""


def cluster(
    work: Path, partition: str | None, options: Sequence[str], python: str, local_disk: str, programs: str
) -> dict[str, Any]:
    """`version`; `partitions` (name, state, limit, nodes, gres); `accounts` with what limits them, None where there is
    no accounting; `quotas` (where, used and limit in bytes); `node`: what a node of the partition is like, with `error`
    where none was free. Or `error` alone. `programs`: what is to be there, with spaces between."""
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
        "quotas": quotas(work),
        "node": _probed(work, partition, options, [python, "-c", PROBE], [local_disk, programs]),
    }


def quotas(work: Path) -> list[dict[str, Any]]:
    """The quotas that the login node reports: by `lfs quota` of Lustre for the file system of `work`, and by `quota`
    for others; `used` and `limit` in bytes."""
    user = getpass.getuser()
    rows = [*_printed(["lfs", "quota", "-q", "-u", user, str(work)]), *_printed(["quota", "-w", "-p"])]
    found = []
    for where, used, soft, hard, *_ in (row.replace("*", "").split() for row in rows if len(row.split()) >= 4):
        limit = next((int(value) for value in (soft, hard) if value.isdigit() and int(value)), 0)
        if used.isdigit() and limit:
            found.append({"where": where, "used": int(used) * 1024, "limit": limit * 1024})
    return found


def _accounts() -> list[dict[str, str]] | None:
    form = f"format={','.join(ACCOUNT_FIELDS)}"
    try:
        rows = slurm.asked(["sacctmgr", "-n", "-P", "show", "assoc", f"user={getpass.getuser()}", form])
    except (slurm.Away, slurm.Refused):
        return None
    return [dict(zip(ACCOUNT_FIELDS, row.split("|"), strict=False)) for row in rows.splitlines()]


def _printed(command: list[str]) -> list[str]:
    """The lines of a program that may not be there, and may say by its exit status that a quota is exceeded."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=slurm.DEADLINE)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines()


def _probed(
    work: Path, partition: str | None, options: Sequence[str], command: list[str], arguments: list[str]
) -> dict[str, Any]:
    seen = work / f"probe-{secrets.token_hex(4)}"
    seen.touch()
    chosen = [f"--partition={partition}"] if partition else []
    step = ["srun", "--quiet", f"--immediate={PROBE_SECONDS}", "--time=1", "--ntasks=1", f"--chdir={work}", *chosen]
    try:
        done = subprocess.run(
            [*step, *options, *command, str(seen), *arguments], capture_output=True, text=True,
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
