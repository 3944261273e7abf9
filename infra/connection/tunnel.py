"""A local port that leads to a port of a host's loopback, through SSH.

Decision: servers on hosts listen only on their loopback, so only users who may log in reach them. The local port stays
the same while the connections below it come and go: each use opens a channel, over a new connection if the old one has
died. A use that can't connect is closed at once, and the next one tries again.
"""

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial

import anyio
import anyio.abc
import paramiko
from anyio import to_thread
from anyio.from_thread import start_blocking_portal

from infra.connection.remote import Remote
from infra.errors import MachineError
from rollouts_core.errors import BadInput

PIECE = 2**16
USES = 512
"""The number of connections at the same time; each has two threads."""

logger = logging.getLogger("rollouts.machines")


@contextmanager
def tunnel(remote: Remote, port: int) -> Iterator[int]:
    """Yields the port, on 127.0.0.1 here, that leads to `port` on 127.0.0.1 there. Ends with all its connections."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(_serving(remote, port)) as local:
        yield local


@asynccontextmanager
async def _serving(remote: Remote, port: int) -> AsyncIterator[int]:
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    limiter = anyio.CapacityLimiter(2 * USES)
    async with listener, anyio.create_task_group() as group:
        group.start_soon(partial(listener.serve, partial(_use, remote, port, limiter)))
        yield listener.extra(anyio.abc.SocketAttribute.local_port)
        group.cancel_scope.cancel()


async def _use(remote: Remote, port: int, limiter: anyio.CapacityLimiter, near: anyio.abc.SocketStream) -> None:
    async with near:
        try:
            far = await to_thread.run_sync(remote.open_port, port, limiter=limiter)
        except (MachineError, BadInput) as error:
            logger.warning("tunnel to port %d: %s", port, error)
            return
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_outward, near, far, limiter)
                await _inward(near, far, limiter)
                group.cancel_scope.cancel()
        finally:
            with suppress(OSError, EOFError, paramiko.SSHException):
                far.close()


async def _outward(near: anyio.abc.SocketStream, far: paramiko.Channel, limiter: anyio.CapacityLimiter) -> None:
    with suppress(OSError, EOFError, paramiko.SSHException, anyio.BrokenResourceError):
        async for data in near:
            await to_thread.run_sync(far.sendall, data, limiter=limiter)
        far.shutdown_write()


async def _inward(near: anyio.abc.SocketStream, far: paramiko.Channel, limiter: anyio.CapacityLimiter) -> None:
    """Copy bytes from the far side until its end. A cancellation closes the channel, which ends the wait."""
    with suppress(OSError, EOFError, paramiko.SSHException, anyio.BrokenResourceError):
        while data := await to_thread.run_sync(far.recv, PIECE, limiter=limiter, abandon_on_cancel=True):
            await near.send(data)
        await near.send_eof()
