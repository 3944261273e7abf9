"""Machines of a cloud, for the time that a run needs them."""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from infra.errors import MachineError, Unreachable
from infra.inventory import Host
from infra.machines.ssh_machine import SSHMachine
from infra.provisioning.provider import Provider
from infra.provisioning.sky import SkyPilot
from rollouts_core.config import EngineMachines, MachineConfig
from rollouts_core.errors import BadInput
from rollouts_core.observe.runs import RunLog

logger = logging.getLogger("rollouts.machines")

RENTED = "rollouts-"
"""How the names of rented machines begin."""
PROVIDERS: Mapping[str, Provider] = {"sky": SkyPilot()}
"""The providers of rented machines, by the kind of machine in a config."""


def rent(names: Sequence[str], asked: EngineMachines, run: RunLog) -> Mapping[str, Host]:
    """Rent all machines at the same time, since each takes minutes."""
    settings = MachineConfig(kind="sky", accelerator=asked.accelerator, gpus=asked.gpus)
    for name in names:
        run.endings.note(f"the rented {name}", partial(give_back, PROVIDERS["sky"], name))
    with ThreadPoolExecutor(max(1, len(names))) as renting:
        return dict(zip(names, renting.map(lambda name: PROVIDERS["sky"].launch(name, settings), names), strict=True))


def find_rented(name: str) -> Host:
    problems: list[Exception] = []
    for provider in PROVIDERS.values():
        try:
            return provider.find(name)
        except (BadInput, MachineError) as error:
            problems.append(error)
    raise problems[0] if len(problems) == 1 else all_failed(problems)


def give_back(provider: Provider, name: str) -> None:
    try:
        provider.down(name)
    except (MachineError, BadInput) as error:
        logger.warning("%s was not given back, it goes down by itself when nothing runs there: %s", name, error)


def release(machine: SSHMachine, provider: Provider | None) -> None:
    in_use = machine.release()
    if provider is not None and not in_use:
        give_back(provider, machine.name)


def all_failed(problems: Sequence[Exception]) -> Exception:
    if all(isinstance(problem, Unreachable) for problem in problems):
        return Unreachable("no machine answers: " + "; ".join(map(str, problems)))
    return BadInput([str(problem) for problem in problems], "no machine can be used")
