"""Safetensors files written tensor by tensor, so that only one of them is in memory.

Decision: the file begins with room for a header, the tensors follow, and the header is written last, when all names and
shapes are known.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.bool: "BOOL"}
DESCRIBED = 120
"""Characters that a tensor's type, shape and place take in a header, at most."""


def write_tensors(
    file: Path,
    names: Iterable[str],
    tensors: Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Write a file of `names`, whose `tensors` come in any order, larger types first.

    Gives each name when it is written; the file is complete behind the last one.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    room = len(json.dumps(header)) + sum(len(name.encode()) + DESCRIBED for name in names)
    room += -room % 8 + 64
    place = 0
    with file.open("wb") as opened:
        opened.seek(8 + room)
        for name, tensor in tensors:
            data = tensor.contiguous().cpu().reshape(-1).view(torch.uint8)
            opened.write(data.numpy().data)
            offsets = [place, place + len(data)]
            header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
            place += len(data)
            yield name
        written = json.dumps(header, separators=(",", ":")).encode()
        assert len(written) <= room, f"{file}: a header of {len(written)} bytes in room for {room}"
        opened.seek(0)
        opened.write(room.to_bytes(8, "little") + written.ljust(room))
