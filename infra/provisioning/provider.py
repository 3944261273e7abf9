"""The protocol of providers, which rent machines."""

from typing import Protocol

from infra.inventory import Host
from rollouts_core.config import MachineConfig


class Provider(Protocol):
    """Rents machines, by names that their users choose.

    A provider must take a machine down by itself when nothing on it has been wanted, and no job has run, for a while:
    an orchestrator that is killed gives nothing back.
    """

    def launch(self, name: str, settings: MachineConfig) -> Host:
        """A machine that can be reached, the same for the same name. Raises `MachineError` when none is to be had."""

    def find(self, name: str) -> Host:
        """How a machine that was launched before is reached. Raises `MachineError` when it is gone."""

    def down(self, name: str) -> None:
        """Give it back. Nothing happens when it is gone."""
