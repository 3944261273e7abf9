"""A second device type without a device: torch's `meta`, and somebody who watches what happens on it.

Tensors on `meta` have shapes and no numbers. So code runs as on a GPU, as far as devices go: an operator that is given
tensors of both devices is an error here as it is there. Where the CPU asks for a number, it gets an invented one, and
the asking is counted: on a GPU it would wait there until all that was asked of the device is done.
"""

import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")
ROOT = Path(__file__).parents[2] / "rollouts_core"
ASKS = {"_local_scalar_dense": 0.5, "is_nonzero": True, "equal": True}
"""Operators that give a number to the CPU, and which."""


class SecondDevice(TorchDispatchMode):
    """While it is entered, `waits` has the places that asked the device for numbers, each with how often."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        """Places that sent tensors to the device."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        given = [value for value in tree_leaves((args, named)) if isinstance(value, torch.Tensor)]
        there = [value for value in given if value.device == DEVICE]
        name = func.overloadpacket.__name__
        if name in ("_to_copy", "to", "copy_"):
            return self._copied(func, args, named)
        strange = [value for value in given if value.device != DEVICE and value.ndim]
        if there and strange:
            raise AssertionError(f"{name} is given tensors of two devices: {[tuple(v.shape) for v in strange]}")
        if there and name in ASKS:
            self.waits[_place()] += 1
            kind = args[0].dtype
            return (kind.is_floating_point and ASKS[name]) or (True if kind == torch.bool else 1)
        if there and (name in ("nonzero", "masked_select") or _takes_by_mask(name, args)):
            raise AssertionError(f"{name}: its shape depends on numbers, so the CPU waits for them")
        return func(*args, **named)

    def _copied(self, func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        into, source = (args[0], args[1]) if func.overloadpacket.__name__ == "copy_" else (None, args[0])
        told = [value for value in (named.get("device"), *args[1:]) if isinstance(value, torch.device)]
        target = into.device if into is not None else (told or [source.device])[0]
        if source.device == DEVICE and target != DEVICE:
            self.waits[_place()] += 1
            invented = torch.full(tuple(source.shape), 0.5).to(named.get("dtype") or source.dtype)
            return into.copy_(invented) if into is not None else invented
        if source.device != DEVICE and target == DEVICE:
            self.sent[_place()] += 1
        return func(*args, **named)


def _takes_by_mask(name: str, args: Sequence[Any]) -> bool:
    return name in ("index", "index_put", "index_put_") and any(
        isinstance(value, torch.Tensor) and value.dtype == torch.bool for value in tree_leaves(args[1])
    )


def _place() -> str:
    """The innermost line of ours."""
    frames = [frame for frame in traceback.extract_stack() if Path(frame.filename).is_relative_to(ROOT)]
    return f"{Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].name}" if frames else "elsewhere"
