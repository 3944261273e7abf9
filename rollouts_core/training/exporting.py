"""A policy as a Hugging Face model directory, written weight by weight.

Decision: weights are gathered and written one at a time, so a model can be written that no rank can hold.
"""

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from rollouts_core.inference.file_names import as_in_files
from rollouts_core.inference.weights import stored
from rollouts_core.training.tensor_file import write_tensors
from rollouts_core.training.weight_files import NotBlocks, pieces_of

FILE_BYTES = 5 * 2**30
"""Larger models are written as several files."""


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
        names = [piece.name for name in part for piece in pieces[name]]
        values = (as_in_files(model, name, weights.get(name, own[name]).detach()) for name in part)
        tensors = chain.from_iterable(value.items() for value in values)
        index |= dict.fromkeys(write_tensors(directory / file, names, tensors), file)
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


def _tell_type(config: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """The type of the weights as they are given out, which shards may be finer than."""
    first = next(iter(weights.values()), None)
    if first is not None:
        told = json.loads(config.read_text()) | {"dtype": str(first.dtype).removeprefix("torch.")}
        config.write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")
