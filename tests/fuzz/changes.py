"""Good data, changed at random places."""

import copy
import random
from collections.abc import Iterator
from typing import Any

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, -0.0, 1e308, float("nan"), float("inf"), "", " ", "x",
    "x" * 5000,
    "\0", "\ud800", "é漢🙂", "../..", "a:b", "{}", "[]", "null", "-1", "1e5", [], {}, [[]], [{}], [None], {"": None},
    {"kind": "jsonl"}, {"kind": "nothing"}, {"kind": 3}, {"kind": None, "path": []}, ["a", 1, None],
]  # fmt: skip
PIECES = [
    b"",
    b"\0",
    b"\n",
    b"\r\n\r\n",
    b"\xff\xfe",
    b"[" * 5000,
    b'{"a":' * 5000,
    b"data:",
    b"NaN",
    b"1e999",
    b"9" * 5000,
]


def changed(value: Any, draw: random.Random) -> Any:
    """A copy with one to three places changed: replaced, removed, added, doubled or renamed."""
    value = copy.deepcopy(value)
    for _ in range(draw.randint(1, 3)):
        places = list(_places(value))
        if not places:
            break
        holder, key = draw.choice(places)
        match draw.randrange(5):
            case 0 | 1:
                holder[key] = any_value(draw)
            case 2:
                del holder[key]
            case 3 if isinstance(holder, dict):
                holder[draw.choice(["", "kind", "x", "path", "name", "\0", "é"])] = any_value(draw)
            case 4 if isinstance(holder, list):
                holder.append(copy.deepcopy(holder[key]))
            case _:
                holder[key] = [copy.deepcopy(holder[key])]
    return value


def any_value(draw: random.Random) -> Any:
    return copy.deepcopy(draw.choice(VALUES))


def changed_bytes(data: bytes, draw: random.Random) -> bytes:
    """With one to three stretches replaced, removed, doubled, or bits of them flipped."""
    for _ in range(draw.randint(1, 3)):
        start = draw.randint(0, len(data))
        end = min(len(data), start + draw.choice([0, 1, 4, 8, 64]))
        there = data[start:end]
        match draw.randrange(5):
            case 0:
                new = draw.choice(PIECES)
            case 1:
                new = b""
            case 2:
                new = there + there
            case 3:
                new = bytes(byte ^ (1 << draw.randrange(8)) for byte in there)
            case _:
                return data[:start]
        data = data[:start] + new + data[end:]
    return data


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(inside):
        yield value, key
        yield from _places(part)
