"""Keys: sha256 over canonical JSON.

Decision: a key is made by an encoder that raises on whatever it cannot encode exactly, never by pickling or by
`repr`. Paths are refused as well: a file enters a key through its content, so that moving it changes nothing.
Operational fields are left out by their type (`rollouts_core.config.schema`).
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from rollouts_core.config.schema import identity_of


def key_of(value: Any) -> str:
    """The sha256 of the value's canonical JSON, in hex. Raises TypeError on what has no canonical form."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def canonical_json(value: Any) -> str:
    """Sorted keys, no white space, plain data only."""
    return json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical(value: Any, where: str = "value") -> Any:
    """Plain JSON data that stands for the value's identity.

    Raises TypeError naming the place when a value (a path, a set, a function) has no canonical form.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise TypeError(f"{where}: {value} has no place in a key")
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {name: canonical(entry, f"{where}.{name}") for name, entry in identity_of(value).items()}
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise TypeError(f"{where}: only text can name an entry")
        return {name: canonical(entry, f"{where}.{name}") for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(entry, f"{where}[{index}]") for index, entry in enumerate(value)]
    raise TypeError(f"{where}: a {type(value).__name__} has no canonical form")
