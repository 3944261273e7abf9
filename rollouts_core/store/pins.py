"""Pins: artifacts and runs that are kept, whatever `gc` is told."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime

from rollouts_core.store.objects import Objects


@dataclass(frozen=True)
class Pin:
    name: str
    """An artifact's directory, or a run's id."""
    reason: str
    at: str


def pin(objects: Objects, name: str, reason: str) -> Pin:
    made = Pin(name, reason, datetime.now(UTC).isoformat(timespec="seconds"))
    objects.write(f"pins/{name}.json", json.dumps({"reason": made.reason, "at": made.at}).encode())
    return made


def unpin(objects: Objects, name: str) -> bool:
    """Whether there was a pin."""
    there = objects.read(f"pins/{name}.json") is not None
    objects.delete(f"pins/{name}.json")
    return there


def pins(objects: Objects) -> list[Pin]:
    contents = {name: objects.read(name) for name in objects.names("pins")}
    return [
        Pin(name.removeprefix("pins/").removesuffix(".json"), **json.loads(content))
        for name, content in contents.items()
        if content
    ]
