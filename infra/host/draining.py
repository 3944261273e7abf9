"""Servers that leave a machine because a person wants it back.

Decision: first the servers get no new requests, then those under way have `LEAVE_SECONDS` to end. The rest is aborted
with its tokens, if the engine can do that, and continues elsewhere.
"""

import asyncio
import json
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollouts_core.loopback import opened

LOOK_SECONDS = 1.0
LEAVE_SECONDS = 30.0
ABORT_SECONDS = 5.0


class Drained(Exception):
    """The machine is to be left."""


async def until_drained(note: Path, replicas: Sequence[Any], tell: Callable[[], None]) -> None:
    """Wait for the note that the machine is drained, let the servers leave, and raise `Drained`."""
    while not note.exists():
        await asyncio.sleep(LOOK_SECONDS)
    for replica in replicas:
        if replica.state == "ready":
            replica.state = "leaving"
            print(f"[{replica.name}] leaves: the machine is drained; it has {LEAVE_SECONDS:.0f} s", flush=True)
    tell()
    await asyncio.sleep(LEAVE_SECONDS)
    for replica in replicas:
        if replica.state == "leaving" and (abort := replica.entry.get("abort")):
            await asyncio.to_thread(_post, f"{replica.url}{abort['path']}", abort["body"])
    await asyncio.sleep(ABORT_SECONDS)
    raise Drained


def _post(url: str, body: dict[str, Any]) -> None:
    """Send a request. A failure is ignored, because the server ends anyway."""
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with suppress(OSError), opened(asked, ABORT_SECONDS):
        pass
