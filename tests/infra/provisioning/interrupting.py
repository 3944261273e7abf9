"""Interrupts at a line of one's choice, as Ctrl-C, SIGTERM and timeouts may come."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from prefect.exceptions import TerminationSignal

import infra
import rollouts_core
import tasks
from infra.errors import JobFailed

OURS = tuple(str(Path(package.__path__[0]).resolve()) for package in (infra, tasks))
ENDING = (
    str(Path(rollouts_core.__path__[0]) / "endings.py"),
    str(Path(rollouts_core.__path__[0]) / "observe" / "runs.py"),
)


class Interrupting:
    """A trace function that raises at the `nth` different line of ours that this thread reaches."""

    def __init__(self, nth: int, error: BaseException) -> None:
        self.nth, self.error = nth, error
        self.seen: set[tuple[str, int]] = set()
        self.at = ""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        return self._line if name.startswith(OURS) or name in ENDING else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        place = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and place not in self.seen:
            self.seen.add(place)
            if len(self.seen) == self.nth:
                self.at = f"{Path(place[0]).name}:{place[1]}"
                raise self.error
        return self._line


def interrupted(action: Callable[[], object], nth: int) -> Interrupting:
    """Run an action until its `nth` line, where Ctrl-C or SIGTERM comes, or to its end, which may be a `JobFailed`."""
    error: BaseException = KeyboardInterrupt() if nth % 2 else TerminationSignal(15)
    tracing = Interrupting(nth, error)
    before = sys.gettrace()
    sys.settrace(tracing)
    try:
        action()
    except (KeyboardInterrupt, TerminationSignal, JobFailed):
        pass
    finally:
        sys.settrace(before)
    return tracing


def lines_in_turn(action: Callable[[], object], stride: int) -> Iterator[str]:
    """The action interrupted at every `stride`-th of its lines, again and again until none is left; yields where."""
    nth = 1
    while True:
        tracing = interrupted(action, nth)
        if not tracing.at:
            assert len(tracing.seen) < nth, "it ended by itself, since it has no such line"
            return
        yield tracing.at
        nth += stride
