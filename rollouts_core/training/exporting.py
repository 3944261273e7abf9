"""A policy as a Hugging Face model directory, written weight by weight.

Decision: a weight is gathered, written and forgotten, so a model that no rank can hold is still written. The format is
safetensors' own: room is left for a header, the weights follow, and the header is written last.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rollouts_core.training.weight_files import NotBlocks, as_in_files, pieces_of, stored

FILE_BYTES = 5 * 2**30
"""Larger models are written as several files."""
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.bool: "BOOL"}
DESCRIBED = 120
"""Characters that a tensor's type, shape and place take in a header, at most."""


def save_policy(
    model: Any, tokenizer: Any, directory: Path, weights: Mapping[str, torch.Tensor], file_bytes: int = FILE_BYTES
) -> None:
    """A Hugging Face model directory, tokenizer included. `weights` take the place of the model's, by its own names."""
    tokenizer.save_pretrained(str(directory))
    own = stored(model)
    try:
        pieces = pieces_of(model)
    except NotBlocks:
        buffers = {name: value for name, value in own.items() if name not in weights}
        model.save_pretrained(str(directory), state_dict={**buffers, **weights})
        return
    model.save_pretrained(str(directory), state_dict={})
    (directory / "model.safetensors").unlink(missing_ok=True)
    parts = _parts(own, file_bytes)
    index: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = "model.safetensors" if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        room = sum(len(piece.name) + DESCRIBED for name in part for piece in pieces[name])
        values = (as_in_files(model, name, weights.get(name, own[name]).detach()) for name in part)
        for name in _write(directory / file, room, values):
            index[name] = file
    if len(parts) > 1:
        size = sum((directory / file).stat().st_size for file in set(index.values()))
        listed = {"metadata": {"total_size": size}, "weight_map": index}
        (directory / "model.safetensors.index.json").write_text(json.dumps(listed, indent=2) + "\n")
    _tell_type(directory / "config.json", weights)


def _parts(own: Mapping[str, torch.Tensor], file_bytes: int) -> list[list[str]]:
    """Names, file by file. What takes more bytes for a number comes first, so that every tensor is aligned."""
    parts: list[list[str]] = [[]]
    size = 0
    for name in sorted(own, key=lambda name: -own[name].element_size()):
        if parts[-1] and size + own[name].nbytes > file_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += own[name].nbytes
    return parts


def _write(file: Path, room: int, values: Iterable[Mapping[str, torch.Tensor]]) -> Iterator[str]:
    """One safetensors file; gives the names of its tensors. `room`: for its header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    room += -room % 8 + 64
    with file.open("wb") as opened:
        opened.seek(8 + room)
        place = 0
        for named in values:
            for name, tensor in named.items():
                data = tensor.contiguous().cpu().reshape(-1).view(torch.uint8)
                opened.write(data.numpy().data)
                header[name] = {
                    "dtype": TYPES[tensor.dtype],
                    "shape": list(tensor.shape),
                    "data_offsets": [place, place + len(data)],
                }
                place += len(data)
                yield name
        written = json.dumps(header, separators=(",", ":")).encode()
        assert len(written) <= room, f"{file}: a header of {len(written)} bytes in room for {room}"
        opened.seek(0)
        opened.write(room.to_bytes(8, "little") + written.ljust(room))


def _tell_type(config: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """The type of the weights as they are given out, which shards may be finer than."""
    first = next(iter(weights.values()), None)
    if first is not None:
        told = json.loads(config.read_text()) | {"dtype": str(first.dtype).removeprefix("torch.")}
        config.write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")
