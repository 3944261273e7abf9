"""Requests to the agent of an allocation on the same node, over a socket of the kernel's own name space.

Nothing is written to a disk. Both sides ask the kernel which user's process the other side is.
"""

import json
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ANSWER_SECONDS = 30.0
REQUEST_SECONDS = 5.0
LENGTH = struct.Struct(">I")
CREDENTIALS = struct.Struct("3i")


def begin(directory: Path, node: int) -> int:
    """Hand the request on standard input to the agent of this node; prints its answer."""
    request = sys.stdin.buffer.read()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_SECONDS)
        connection.connect(name_of(directory, str(node)))
        if user_behind(connection) != os.getuid():
            print(json.dumps({"error": "the agent's socket on this node is another user's"}))
            return 0
        connection.sendall(LENGTH.pack(len(request)) + request)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    print(answer.decode())
    return 0


@contextmanager
def listening(directory: Path, what: str, patience: float) -> Iterator[socket.socket]:
    """Listen for requests about `what` of an allocation; `patience`: seconds to wait for each."""
    with socket.socket(socket.AF_UNIX) as asked:
        asked.bind(name_of(directory, what))
        asked.listen(8)
        asked.settimeout(patience)
        yield asked


def answer_one(asked: socket.socket, answered: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """Answer a request, if one comes in time."""
    try:
        connection, _ = asked.accept()
    except TimeoutError:
        return
    with connection:
        connection.settimeout(REQUEST_SECONDS)
        try:
            if user_behind(connection) != os.getuid():
                return
            (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
            answer = answered(json.loads(_exactly(connection, length)))
            connection.sendall(json.dumps(answer).encode())
        except (OSError, EOFError, ValueError) as error:
            print(f"a request could not be read: {error!r}", file=sys.stderr)


def name_of(directory: Path, what: str) -> str:
    """The name of the socket."""
    return f"\0rollouts-{os.getuid()}-{directory.name}-{what}"


def user_behind(connection: socket.socket) -> int:
    """Whose process the other side is."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(found)[1])


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise EOFError("the connection ended")
        data += piece
    return data
