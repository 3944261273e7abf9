"""A list of what must end with its owner: jobs, leases, rented machines, connections.

Decision: an ending is noted before the thing begins, and removed after the thing has ended. An interrupt (Ctrl-C,
SIGTERM, a timeout) may come at any line. If the ending were noted after the start, an interrupt in between would leave
something running that nobody knows of.

Decision: an ending may be called twice. If an interrupt comes while things are ended, the rest stays noted, and the
next outer owner ends it.
"""

import logging
from collections.abc import Callable

from rollouts_core.errors import RolloutsError

logger = logging.getLogger("rollouts.machines")


class Endings:
    """The things to end, by name, in the order in which they began. Safe to use from several threads.

    At the end of a `with` block everything noted is ended. If an interrupt breaks that off, the rest is ended then.
    """

    def __init__(self) -> None:
        self._ends: dict[str, Callable[[], object]] = {}
        self._over = False

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        try:
            self.end_all()
        finally:
            self.end_all()

    def note(self, name: str, end: Callable[[], object]) -> None:
        """Note something before it begins. `end` must do no harm when called twice, or before the thing has begun.

        Raises `RolloutsError` once everything has been ended: then nothing may begin.
        """
        self._ends[name] = end
        if self._over:
            del self._ends[name]
            raise RolloutsError(f"{name} is not started: its run is ending")

    def forget(self, name: str) -> None:
        """Forget what has ended."""
        self._ends.pop(name, None)

    def end_all(self) -> None:
        """The last first. What fails to end is told of, and does not keep the others from ending."""
        self._over = True
        while names := list(self._ends):
            self._end(names[-1])

    def _end(self, name: str) -> None:
        try:
            self._ends[name]()
        except Exception as error:
            logger.warning("%s could not be ended: %s", name, error)
        self.forget(name)
