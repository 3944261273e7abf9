"""Machines rented through SkyPilot's command line, which lives in an environment of its own.

Decision: SkyPilot is used as a program, not as a library, so its dependencies and ours never meet. Only documented
commands are used (`sky launch`, `sky exec`, `sky down`, `ssh CLUSTER`).

Decision: SkyPilot calls a machine idle when its queue is empty, and our jobs are not in its queue. So we launch a job
that ends when nothing on the machine was wanted and no job ran for `IDLE_MINUTES`. Then SkyPilot's own autostop takes
the machine down, even if the orchestrator is gone.

Decision: the host key of a new machine is asked for through SkyPilot's own channel, and noted in a known-hosts file of
ours. It is as trustworthy as that channel.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from infra.errors import MachineError
from infra.host.ssh_client import server_name
from infra.inventory import Host
from rollouts_core.config import MachineConfig
from rollouts_core.errors import BadInput

VARIABLE = "ROLLOUTS_SKY"
LAUNCH_SECONDS = 3600.0
COMMAND_SECONDS = 600.0
IDLE_MINUTES = 10
AUTOSTOP_MINUTES = 5
LAST_LINES = 15
WORK = "~/.rollouts"
KEEPER = f"""sleep {IDLE_MINUTES * 60}
while find {WORK} -maxdepth 4 \\( -name alive -o -name heartbeat \\) -mmin -{IDLE_MINUTES} 2>/dev/null | grep -q .
do sleep 60
done
"""
HOST_KEY = re.compile(r"(ssh-ed25519|ecdsa-sha2-nistp\d+|ssh-rsa) ([A-Za-z0-9+/=]{60,})")


class SkyPilot:
    """A provider. Keeps nothing in memory: what is rented, SkyPilot knows."""

    def launch(self, name: str, settings: MachineConfig) -> Host:
        gpus = 1 if settings.gpus is None else settings.gpus
        task = {
            "name": name,
            "resources": {
                **({"accelerators": f"{settings.accelerator}:{gpus}"} if gpus else {}),
                "autostop": {"idle_minutes": AUTOSTOP_MINUTES, "down": True},
            },
            "run": KEEPER,
        }
        with tempfile.TemporaryDirectory(prefix="rollouts-sky-") as directory:
            file = Path(directory) / "task.yaml"
            file.write_text(json.dumps(task))  # JSON is YAML
            _sky("launch", "-y", "-d", "-c", name, str(file), seconds=LAUNCH_SECONDS)
        return self._reached(name, gpus)

    def find(self, name: str) -> Host:
        return self._reached(name, 0)

    def down(self, name: str) -> None:
        _sky("down", "-y", name)

    def _reached(self, name: str, gpus: int) -> Host:
        """How `ssh CLUSTER` gets there, with the host key that the machine says it has."""
        done = subprocess.run(["ssh", "-G", name], capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True)
        found = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
        if found.get("proxycommand", "none") != "none":
            raise MachineError(
                f"{name} is reached through a proxy command, which is not supported: rent a plain machine"
            )
        said = _sky("exec", name, "cat /etc/ssh/ssh_host_*_key.pub")
        keys = sorted(set(HOST_KEY.findall(said)))
        if not keys:
            raise MachineError(f"{name}: SkyPilot does not tell its host key")
        port = int(found.get("port", "22"))
        address = server_name(found["hostname"], port)
        known_hosts = _folder() / f"{name}.known_hosts"
        known_hosts.write_text("".join(f"{address} {kind} {key}\n" for kind, key in keys))
        return Host(
            host=found["hostname"], port=port, user=found.get("user"), key=Path(found["identityfile"]),
            known_hosts=known_hosts, work=WORK, gpus=gpus,
        )  # fmt: skip


def _sky(*arguments: str, seconds: float = COMMAND_SECONDS) -> str:
    """Run `sky` and return its output. Raises `BadInput` without SkyPilot, `MachineError` with its last lines."""
    program = os.environ.get(VARIABLE) or shutil.which("sky")
    if program is None:
        raise BadInput(f"there is no `sky` here: install SkyPilot in its own environment, or name it in {VARIABLE}")
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise MachineError(f"`sky {arguments[0]}` did not end within {seconds:.0f} s") from None
    except OSError as error:
        raise BadInput(f"{program} can't be run: {error.strerror}") from None
    if done.returncode:
        lines = "\n    ".join((done.stdout + done.stderr).splitlines()[-LAST_LINES:])
        raise MachineError(f"`sky {arguments[0]}` failed:\n    {lines}")
    return done.stdout


def _folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollouts" / "sky"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder
