"""The events of a run, as values sent through the standard logger `rollouts.events`.

Tasks announce events and do not know who listens: Prefect gets log lines and progress artifacts, a terminal draws
progress bars from the same events, a test collects them.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollouts_core.observe.run_records import StageState

logger = logging.getLogger("rollouts.events")
logger.setLevel(logging.INFO)
logger.addHandler(logging.NullHandler())
logger.propagate = False


@dataclass(frozen=True)
class StageChanged:
    name: str
    state: StageState
    seconds: float = 0.0


@dataclass(frozen=True)
class StageLine:
    name: str
    text: str


@dataclass(frozen=True)
class StageProgress:
    name: str
    done: int
    total: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    step: int = 0
    """The step within the whole training, where that has several stages."""


@dataclass(frozen=True)
class StageRollouts:
    """Some rollouts of a training step."""

    name: str
    step: int
    rollouts: Sequence[Mapping[str, Any]]


Event = StageChanged | StageLine | StageProgress | StageRollouts


def announce(event: Event) -> None:
    logger.info("%s", event, extra={"event": event})
