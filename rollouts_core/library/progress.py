"""How far a training is: a bar in a terminal, a line in a notebook that changes in place, nothing elsewhere."""

import sys
from contextlib import ExitStack
from typing import Any, Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar(Protocol):
    def move(self, done: int, told: str) -> None:
        """`done` steps, and what the last one told."""

    def end(self) -> None: ...


def bar_of(total: int) -> Bar:
    if _in_a_notebook():
        return _InNotebook(total)
    return _InTerminal(total) if sys.stdout.isatty() else _Nowhere()


def _in_a_notebook() -> bool:
    """IPython with a kernel behind it. One that is not imported has none."""
    ipython: Any = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


class _InTerminal:
    def __init__(self, total: int) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        self._progress, self._open = Progress(*columns, auto_refresh=False), ExitStack()
        self._open.enter_context(self._progress)
        self._task = self._progress.add_task("", total=total)

    def move(self, done: int, told: str) -> None:
        self._progress.update(self._task, completed=done, description=told, refresh=True)

    def end(self) -> None:
        self._open.close()


class _InNotebook:
    def __init__(self, total: int) -> None:
        from IPython.display import display

        self._total = total
        self._shown: Any = display({"text/plain": f"0/{total}"}, raw=True, display_id=True)

    def move(self, done: int, told: str) -> None:
        self._shown.update({"text/plain": f"{done}/{self._total}  {told}"}, raw=True)

    def end(self) -> None:
        """The last line stays."""


class _Nowhere:
    def move(self, done: int, told: str) -> None:
        """Do nothing: progress is not shown."""

    def end(self) -> None:
        """Do nothing: progress is not shown."""
