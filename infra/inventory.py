"""The machines there are: a TOML file, one table per machine.

[gpu1]
host = "10.0.0.5"
user = "me"
gpus = 8
labels = ["h100"]
"""

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from rollouts_core.config.schema import part
from rollouts_core.errors import BadInput

VARIABLE = "ROLLOUTS_MACHINES"
WORD = r"^[^\s-]\S*$"


@part
class Slurm:
    """How jobs are submitted to a cluster. GPUs and nodes are the config's (`machine.gpus`, `machine.nodes`)."""

    partition: str | None = Field(default=None, pattern=WORD, description="Default: the cluster's own default.")
    account: str | None = Field(default=None, pattern=WORD, description="The account that pays.")
    qos: str | None = Field(default=None, pattern=WORD, description="Quality of service.")
    reservation: str | None = Field(default=None, pattern=WORD, description="A reservation to run in.")
    constraint: str | None = Field(
        default=None, pattern=r"^\S+$", description="Features that nodes must have, for example a100&ib."
    )
    gpu_type: str | None = Field(
        default=None, pattern=WORD, description="Slurm's name of the GPU (gres), for example h100."
    )
    cpus: int | None = Field(default=None, ge=1, description="Processors on each node; default: the cluster's own.")
    memory_gb: float | None = Field(default=None, gt=0, description="Memory on each node; default: the cluster's own.")
    exclusive: bool = Field(default=False, description="Share no node with others.")
    hours: float | None = Field(
        default=None,
        gt=0,
        description="Length of an allocation; default: machine.time_limit_hours, or the partition's limit.",
    )
    signal_seconds: int = Field(
        default=120, ge=15, le=65535, description="Seconds before its end at which jobs write a checkpoint and leave."
    )
    cpu_partition: str | None = Field(
        default=None,
        pattern=WORD,
        description="Partition for jobs without GPUs, for example parts of tokenization; default: partition.",
    )
    modules: tuple[str, ...] = Field(default=(), description="Modules to load first (`module load`).")
    container: str | None = Field(
        default=None,
        min_length=1,
        description="The command that runs jobs, with options: apptainer exec --nv --bind /scratch /images/torch.sif",
    )
    sshfs: bool = Field(
        default=False, description="Compute nodes do not see `work`, and mount it from the login node by sshfs."
    )
    local_disk: str | None = Field(
        default=None,
        min_length=1,
        description="A directory on each node's own disk, for files that are read often; may be a variable: $TMPDIR",
    )
    options: tuple[str, ...] = Field(default=(), description="Further options of sbatch, passed as they are.")


@part
class Host:
    """How a machine is reached, and what it has."""

    host: str = Field(min_length=1, pattern=r"^[^\s-]\S*$", description="Name or address.")
    port: int = Field(default=22, ge=1, le=65535, description="Port of its SSH server.")
    user: str | None = Field(default=None, description="The user to log in as; default: your name on this machine.")
    key: Path | None = Field(default=None, description="A private key; default: the SSH agent's, or those in ~/.ssh.")
    known_hosts: Path = Field(default=Path("~/.ssh/known_hosts"), description="The file that lists its host key.")
    jump: str | None = Field(default=None, description="Another machine of this file, as a jump host.")
    work: str = Field(
        default="~/.rollouts",
        min_length=1,
        description="The work directory on the machine, for everything that is kept there.",
    )
    python: str = Field(default="python3", min_length=1, description="Python 3.11 or later on the machine.")
    environment: Literal["built", "own"] = Field(
        default="built",
        description="built: an environment is built there from pins. own: jobs use the packages of this Python.",
    )
    requirements: Path | None = Field(
        default=None,
        description="Pins of the environment; default: the versions of jobs' packages that are installed here.",
    )
    wheels: Path | None = Field(
        default=None, description="A directory of wheels on this machine, for machines without network."
    )
    gpus: int = Field(default=0, ge=0, description="Number of GPUs that may be used.")
    gpu_memory_gb: float = Field(default=0.0, ge=0, description="Memory of each GPU.")
    labels: tuple[str, ...] = Field(default=(), description="Words that a config can ask for.")
    address: str | None = Field(default=None, description="Address by which other machines reach it; default: host.")
    slurm: Slurm | None = Field(default=None, description="Set if the machine is the login node of a Slurm cluster.")

    @property
    def for_machines(self) -> str:
        """The name or address by which other machines reach it."""
        return self.address or self.host


def inventory_file() -> Path:
    """`ROLLOUTS_MACHINES`, or machines.toml in the user's configuration directory."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "rollouts" / "machines.toml"


def load_inventory() -> dict[str, Host]:
    """All machines of the inventory by name; none if there is no file. Raises `BadInput` with all its problems."""
    path = inventory_file()
    try:
        tables = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"{path}: {error}") from None
    found: dict[str, Host] = {}
    problems = []
    for name, table in tables.items():
        try:
            found[name] = _host(name, table)
        except BadInput as error:
            problems += [f"{name}: {problem.removeprefix('Host.')}" for problem in error.problems]
    jumps = {name: host.jump for name, host in found.items() if host.jump}
    problems += [
        f"{name}: jump {jump!r} is not a machine of this file" for name, jump in jumps.items() if jump not in tables
    ]
    problems += [f"{name}: its jumps lead back to it" for name in jumps if _leads_back(name, jumps)]
    if problems:
        raise BadInput(problems, str(path))
    return found


def find_host(name: str) -> Host:
    """Raises `BadInput` when there is no such machine."""
    inventory = load_inventory()
    if name not in inventory:
        known = f"there are {', '.join(sorted(inventory))}" if inventory else "it lists none"
        raise BadInput(f"no machine {name!r} in {inventory_file()}: {known}; `rollouts machines add {name} --host ...`")
    return inventory[name]


def add_host(name: str, values: Mapping[str, Any]) -> Path:
    """Append a machine to the file, which is returned. Raises `BadInput` for bad values or a name that is taken."""
    path = inventory_file()
    if name in load_inventory():
        raise BadInput(f"{path} has a machine {name!r} already: edit it there")
    _host(name, dict(values))
    own = {field: value for field, value in values.items() if not isinstance(value, Mapping)}
    lines = [f"[{json.dumps(name)}]", *_lines(own)]
    if isinstance(slurm := values.get("slurm"), Mapping):
        lines += [f"[{json.dumps(name)}.slurm]", *_lines(slurm)]
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_text() if path.exists() else ""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(f"{before.rstrip()}\n\n".lstrip() + "\n".join(lines) + "\n")
    unfinished.replace(path)
    load_inventory()
    return path


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [f"{field} = {json.dumps(value)}" for field, value in values.items()]


def _host(name: str, table: Any) -> Host:
    if not isinstance(table, dict):
        raise BadInput(f"is not a table: write [{name}] above its fields")
    if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise BadInput(f"{name!r} is not a valid name of a machine: use letters, digits, '-', '_' and '.'")
    unknown = sorted(set(table) - {field.name for field in fields(Host)})
    nested = table.get("slurm", {})
    if not isinstance(nested, dict):
        raise BadInput(f"slurm: is not a table: write [{name}.slurm] above its fields")
    unknown += [f"slurm.{field}" for field in sorted(set(nested) - {field.name for field in fields(Slurm)})]
    if unknown:
        raise BadInput([f"{field}: no such field" for field in unknown])
    return Host(**table)


def _leads_back(name: str, jumps: Mapping[str, str]) -> bool:
    at, seen = jumps.get(name), {name}
    while at is not None and at not in seen:
        seen.add(at)
        at = jumps.get(at)
    return at == name
