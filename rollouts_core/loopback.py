"""HTTP to servers on this machine. Standard library only: it is part of what is sent to hosts.

Decision: an address is asked directly. A proxy of the environment is not used, and a redirect counts as an error: no
server of ours sends one.
"""

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse

HANDLERS = (
    urllib.request.HTTPHandler, urllib.request.HTTPSHandler, urllib.request.HTTPDefaultErrorHandler,
    urllib.request.HTTPErrorProcessor, urllib.request.UnknownHandler,
)  # fmt: skip


@contextmanager
def opened(asked: str | urllib.request.Request, seconds: float) -> Iterator[HTTPResponse]:
    """The answer, to be read. `seconds`: how long to wait for each part of it.

    Raises `OSError` if nothing answers in time, if the status is not 2xx, or if the answer is not HTTP.
    """
    opener = urllib.request.OpenerDirector()
    for handler in HANDLERS:
        opener.add_handler(handler())
    try:
        with opener.open(asked, timeout=seconds) as answer:
            yield answer
    except (HTTPException, OverflowError) as error:  # it reads whatever length is told
        raise OSError(f"the answer is not HTTP: {type(error).__name__}: {error}") from error
