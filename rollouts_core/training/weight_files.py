"""The places of a model's weights in its files, so that a block of a weight is read without the rest.

Decision: transformers knows how its weights become those of the files (`revert_weight_conversion`), and is asked on the
meta device. There each tensor of the files is a view of a weight, and the view's offset and strides say which block of
the weight it is. So joined experts, and everything else that transformers joins, need no code of their own here.

Legend: a block is one slice for each dimension of a weight, with a start and a stop.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rollouts_core.errors import BadInput
from rollouts_core.inference.file_names import on_meta, viewed
from rollouts_core.inference.weights import stored

Block = tuple[slice, ...]


class WeightFiles:
    """The weights of a model directory, by the model's own names. `files[name][block]` reads a block.

    `model` may be on the meta device. Raises `BadInput` where a weight is in no file, or has another shape there, and
    `NotBlocks` where the files hold something that is not a block of a weight.
    """

    def __init__(self, model: Any, directory: Path) -> None:
        self._files = _files(directory)
        self._pieces = {name: self._found(pieces, model) for name, pieces in pieces_of(model).items()}
        self._check(directory)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __getitem__(self, name: str) -> "StoredWeight":
        return StoredWeight([(piece, self._files[piece.name]) for piece in self._pieces[name]])

    def _found(self, pieces: "Sequence[Piece]", model: Any) -> "list[Piece]":
        """Weights by the names of these files, which may lack the head's prefix, as in a base model's files."""
        prefix = f"{model.base_model_prefix}."
        shorter = [piece.renamed(piece.name.removeprefix(prefix)) for piece in pieces]
        return [short if short.name in self._files else piece for piece, short in zip(pieces, shorter, strict=True)]

    def _check(self, directory: Path) -> None:
        problems = []
        for name, pieces in self._pieces.items():
            for piece in pieces:
                if piece.name not in self._files:
                    problems.append(f"{piece.name} is in no file")
                elif (there := shape_in(self._files[piece.name], piece.name)) != piece.shape:
                    problems.append(f"{piece.name} is {there}, and the model's {name} needs {piece.shape}")
        if problems:
            more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise BadInput(f"the weights in {directory} are not this model's: {'; '.join(problems[:3])}{more}")


@dataclass(frozen=True)
class StoredWeight:
    """A tensor in files, in pieces. The files stay open."""

    pieces: "Sequence[tuple[Piece, Any]]"
    """Each with its file."""

    def __getitem__(self, block: Block) -> torch.Tensor:
        """Read from the files that hold some of it, in the type that they have."""
        found: torch.Tensor | None = None
        for piece, file in self.pieces:
            common = piece.common(block)
            if common is None:
                continue
            read = piece.as_in_weight(file.get_slice(piece.name)[piece.inside(common)], common)
            if common == block:
                return read
            if found is None:
                found = torch.empty([side.stop - side.start for side in block], dtype=read.dtype)
            found[tuple(slice(c.start - b.start, c.stop - b.start) for c, b in zip(common, block, strict=True))] = read
        return torch.empty([side.stop - side.start for side in block]) if found is None else found


class NotBlocks(Exception):
    """The files hold something that is not a block of one of the model's weights."""


@dataclass(frozen=True)
class Piece:
    """A tensor of the files, which is a block of a weight, perhaps with dimensions left out or in another order."""

    name: str
    shape: tuple[int, ...]
    """The shape in the files."""
    block: Block
    """The block of the weight."""
    dims: tuple[int | None, ...]
    """Which dimension of the weight each of its own is; None for one of size 1."""

    def renamed(self, name: str) -> "Piece":
        return Piece(name, self.shape, self.block, self.dims)

    def common(self, wanted: Block) -> Block | None:
        """The part of `wanted` that this piece holds, as a block of the weight; None if it holds nothing of it."""
        both = tuple(
            slice(max(own.start, other.start), min(own.stop, other.stop))
            for own, other in zip(self.block, wanted, strict=True)
        )
        return both if all(side.start < side.stop for side in both) else None

    def inside(self, common: Block) -> Block:
        """The same as a block of the tensor in the files."""
        return tuple(
            slice(0, 1) if dim is None
            else slice(common[dim].start - self.block[dim].start, common[dim].stop - self.block[dim].start)
            for dim in self.dims
        )  # fmt: skip

    def as_in_weight(self, read: torch.Tensor, common: Block) -> torch.Tensor:
        """Values that were read at `inside`, with the weight's dimensions."""
        own = [(dim, place) for place, dim in enumerate(self.dims) if dim is not None]
        left = [place for place, dim in enumerate(self.dims) if dim is None]
        ordered = read.permute([place for _, place in sorted(own)] + left)
        return ordered.reshape([side.stop - side.start for side in common])


def pieces_of(model: Any) -> dict[str, list[Piece]]:
    """Pieces by the weights' names in the model. Raises `NotBlocks`."""
    own = {name: on_meta(value) for name, value in stored(model).items()}
    storages = {value.untyped_storage()._cdata: name for name, value in own.items()}
    reverted = viewed(model, own)
    pieces: dict[str, list[Piece]] = {name: [] for name in own}
    for name, view in reverted.items():
        weight = storages.get(view.untyped_storage()._cdata)
        if weight is None:
            raise NotBlocks(f"{name} of the files is computed from the weights of {model.config.model_type}")
        pieces[weight].append(_piece(name, view, own[weight]))
    return pieces


def _piece(name: str, view: torch.Tensor, weight: torch.Tensor) -> Piece:
    rest, starts = int(view.storage_offset()), []
    for stride in weight.stride():
        start, rest = divmod(rest, stride)
        starts.append(start)
    lengths, dims = [1] * weight.ndim, []
    by_stride = {
        stride: dim for dim, (size, stride) in enumerate(zip(weight.shape, weight.stride(), strict=True)) if size > 1
    }
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size > 1 and stride not in by_stride:
            raise NotBlocks(f"{name} of the files is not a block of a weight")
        dims.append(by_stride[stride] if size > 1 else None)
        if size > 1:
            lengths[by_stride[stride]] = size
    block = tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))
    return Piece(name, tuple(view.shape), block, tuple(dims))


def opened(path: Path) -> Any:
    """A safetensors file. Raises `BadInput` where it is damaged."""
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise BadInput(f"{path} is cut off or damaged: {error}") from None


def shape_in(file: Any, name: str) -> tuple[int, ...]:
    """Shape of a tensor in an open file."""
    return tuple(file.get_slice(name).get_shape())


def _files(directory: Path) -> dict[str, Any]:
    """The open file of each tensor in the directory. Raises `NotBlocks` where there is none."""
    found: dict[str, Any] = {}
    for path in sorted(directory.glob("*.safetensors")):
        file = opened(path)
        found |= dict.fromkeys(file.keys(), file)
    if not found:
        raise NotBlocks(f"{directory} holds no safetensors")
    return found
