"""The requirements of a config, and the machines of the inventory that meet them."""

import os
from collections.abc import Collection

from infra.inventory import Host, find_host, inventory_file, load_inventory
from rollouts_core.config import EngineMachines, MachineConfig
from rollouts_core.errors import BadInput


def fitting_hosts(settings: MachineConfig) -> dict[str, Host]:
    """The machines of the inventory that can do what is asked. Raises `BadInput` saying what each one lacks."""
    inventory = {settings.name: find_host(settings.name)} if settings.name else load_inventory()
    if not inventory:
        raise BadInput(f"there are no machines in {inventory_file()}: `rollouts machines add NAME --host ...`")
    lacks = {name: _lacks(host, settings) for name, host in inventory.items()}
    fitting = {name: host for name, host in inventory.items() if not lacks[name]}
    if not fitting:
        raise BadInput([f"{name}: {', '.join(lack)}" for name, lack in lacks.items()], "no machine fits")
    return fitting


def engine_hosts(asked: EngineMachines, taken: Collection[str | None]) -> dict[str, Host]:
    """The machines of the inventory that may have servers. Those that are `taken`, since they train, only by name and
    with so many GPUs as are said.

    Raises `BadInput` saying what each one lacks.
    """
    hosts = {name: find_host(name) for name in asked.names} or load_inventory()
    settings = MachineConfig(kind="ssh", gpus=asked.gpus, gpu_memory_gb=asked.gpu_memory_gb, labels=asked.labels)
    lacks = {name: _lacks(host, settings) for name, host in hosts.items()}
    for name, host in hosts.items():
        if host.slurm:
            lacks[name] = ["is a Slurm cluster: there, servers run in the trainer's allocation (engine.machines.nodes)"]
        if host.jump and host.address is None:
            lacks[name].append(f"is reached through {host.jump}; say in `address` how the trainer's machine reaches it")
    for name in asked.names:
        if name in taken and asked.gpus is None:
            lacks[name].append("trains as well; say how many of its GPUs are for servers (machines.gpus)")
    left = {
        name: host for name, host in hosts.items() if not lacks[name] and (name in asked.names or name not in taken)
    }
    if not left or any(lacks[name] for name in asked.names):
        problems = [f"{name}: {', '.join(lack)}" for name, lack in lacks.items() if lack]
        raise BadInput(problems or [f"{inventory_file()} lists none"], "engine.machines: no machine fits")
    return left


def wanted_gpus(settings: MachineConfig, there: int) -> int:
    """The number of GPUs that the config asks for; by default one, if the machine has any."""
    return min(1, there) if settings.gpus is None else settings.gpus


def passed_variables(settings: MachineConfig) -> dict[str, str]:
    """The environment variables that jobs are to have. Raises `BadInput` for those that are not set here."""
    missing = [name for name in settings.environment if name not in os.environ]
    if missing:
        raise BadInput([f"machine.environment: {name} is not set here" for name in missing])
    return {name: os.environ[name] for name in settings.environment}


def _lacks(host: Host, settings: MachineConfig) -> list[str]:
    problems = []
    if settings.kind == "slurm" and host.slurm is None:
        problems.append("is no Slurm cluster: it has no `slurm` table")
    if settings.kind == "ssh" and host.slurm is not None:
        problems.append("is the login node of a Slurm cluster; set kind to slurm")
    if host.gpus < wanted_gpus(settings, host.gpus):
        problems.append(f"has {host.gpus} GPUs, not {settings.gpus}")
    if settings.gpu_memory_gb > host.gpu_memory_gb:
        problems.append(f"its GPUs have {host.gpu_memory_gb:g} GB, not {settings.gpu_memory_gb:g}")
    if missing := sorted(set(settings.labels) - set(host.labels)):
        problems.append(f"is not labelled {', '.join(missing)}")
    return problems
