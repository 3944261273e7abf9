"""A model's weights by the names in its files. transformers joins some weights that are separate there, mostly experts.

Decision: the conversion is transformers' own (`revert_weight_conversion`).
"""

from collections.abc import Callable, ItemsView, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollouts_core.inference.weights import LazyWeights, shapes_of, stored


def file_shapes(model: Any) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape of each tensor of a model's files, by its name there."""
    reverted = viewed(model, {name: on_meta(value) for name, value in stored(model).items()})
    return {name: (value.dtype, tuple(value.shape)) for name, value in reverted.items()}


def as_in_files(model: Any, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """A weight of the model as the tensors that its files hold of it."""
    return _reverted(model, {name: value})


def named_as_in_files(model: Any) -> "Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]":
    """A function that renames weights from the model's names to the names in its files."""
    shapes = {name: shape for name, (_, shape) in file_shapes(model).items()}
    if shapes.keys() == stored(model).keys():
        return lambda weights: weights
    return lambda weights: _Renamed(model, weights, shapes)


def viewed(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights on the meta device as those of the files, which are views of them as far as they are blocks of them."""
    with _Views():  # type: ignore[no-untyped-call]
        return _reverted(model, weights)


def on_meta(value: torch.Tensor) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


class _Renamed(LazyWeights):
    """Weights by the files' names, of which each of the model's own is asked for once, in order."""

    def __init__(self, model: Any, weights: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(shapes, self._look)
        self._model, self._weights = model, weights

    def items(self) -> ItemsView[str, torch.Tensor]:
        return _Streamed(self, self._all)

    def _all(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in shapes_of(self._weights):
            yield from as_in_files(self._model, name, self._weights[name]).items()

    def _look(self, wanted: str) -> torch.Tensor:
        return next(tensor for name, tensor in self._all() if name == wanted)


class _Streamed(ItemsView[str, torch.Tensor]):
    def __init__(self, weights: LazyWeights, pairs: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> None:
        super().__init__(weights)
        self._pairs = pairs

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._pairs()


def _reverted(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, torch.Tensor] = revert_weight_conversion(model, weights)
    return found


class _Views(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies of meta tensors stay views of what they are copied from."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0].view_as(args[0])
        return func(*args, **(kwargs or {}))
