"""The changes between two versions of a file of weights. The new file is made from the old one and the changes.

Decision: most updates of an optimizer step are smaller than the last bit of a bfloat16 weight. So most weights of two
versions are the same, their XOR is mostly zeros, and zlib makes it small. The low bytes of the 16-bit words come first
and the high bytes after them: changes are in low bytes, and zlib compresses similar bytes better.

The standard library is enough: hosts that have nothing else use it too. NumPy is several times faster if it is there. A
file is treated in pieces of `PIECE` bytes.
"""

import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

numpy: Any = None
with suppress(ImportError):
    import numpy

PIECE = 2**20
LEVEL = 1


def pieces(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), PIECE):
        yield data[start : start + PIECE]


def change(before: bytes, after: bytes) -> bytes:
    """The change from one piece to another of the same length."""
    different = _xor(before, after)
    return zlib.compress(different[::2] + different[1::2], LEVEL)


def changed(before: bytes, change: bytes) -> bytes:
    """The piece behind a change. Raises ValueError where the change is damaged or of another piece."""
    try:
        low_high = zlib.decompress(change, bufsize=len(before))
    except zlib.error as error:
        raise ValueError(f"a change of weights can't be read: {error}") from None
    if len(low_high) != len(before):
        raise ValueError(f"a change of {len(low_high)} bytes is of another piece: that has {len(before)}")
    different = bytearray(len(before))
    half = (len(before) + 1) // 2
    different[::2], different[1::2] = low_high[:half], low_high[half:]
    return _xor(before, different)


def _xor(one: bytes, other: bytes | bytearray) -> bytes:
    if numpy is not None:
        xored: bytes = (numpy.frombuffer(one, "u1") ^ numpy.frombuffer(other, "u1")).tobytes()
        return xored
    both = int.from_bytes(one, "little") ^ int.from_bytes(other, "little")
    return both.to_bytes(len(one), "little")
