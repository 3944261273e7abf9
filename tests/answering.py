"""A program at a port that says the same to everybody."""

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SSH = b"SSH-2.0-OpenSSH_9.2\r\n"


def ok(body: bytes, length: int | None = None) -> bytes:
    """An answer with status 200. `length`: the length that it tells, if not its own."""
    told = len(body) if length is None else length
    return b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (told, body)


@contextmanager
def answering(said: bytes) -> Iterator[str]:
    """Its address."""

    class Says(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(2**16)
            self.request.sendall(said)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Says) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
