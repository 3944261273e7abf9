"""The Prefect server a run reports to: the configured one, that of `rollouts up`, or a temporary one that lives as long
as the run."""

import atexit
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from flows.found_server import find_server
from flows.preflight import check_server
from flows.temporary_server import TemporaryServer, start_server, stop
from rollouts_core.errors import BadInput
from rollouts_core.observe.served import PAGES


def begin_server(begun: TemporaryServer | None = None, outputs: Path | None = None) -> Callable[[], None]:
    """Prefect has a server from here on; it can be used when what is returned has been called, which waits for it.
    Meanwhile there is much to import. Raises `BadInput` when the configured one does not answer.

    `begun`: a temporary one that is starting, and is stopped where it is not wanted. `outputs`: of the run, which links
    to its pages where `up` serves that directory.
    """
    if configured := PREFECT_API_URL.value():
        _drop(begun)
        check_server(configured)
        return lambda: None
    until_exit = ExitStack()
    atexit.register(until_exit.close)
    if (found := find_server()) and _answers(found.api):
        _drop(begun)
        if outputs is not None and found.outputs == str(outputs.resolve()):
            os.environ.setdefault(PAGES, found.pages)
        until_exit.enter_context(temporary_settings({PREFECT_API_URL: found.api}))
        return lambda: None
    server = begun or start_server()
    settings = {PREFECT_API_URL: server.api, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}  # nobody looks for lost runs
    until_exit.enter_context(temporary_settings(settings))
    return server.wait


def _drop(begun: TemporaryServer | None) -> None:
    if begun is not None:
        stop(begun.process)


def _answers(url: str) -> bool:
    try:
        check_server(url)
    except BadInput:
        return False
    return True
