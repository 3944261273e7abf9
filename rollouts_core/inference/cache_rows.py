"""Keys and values of running requests: a row for each, as many rows and columns as they need.

Decision: a request is a row, so that a decoding step reads rows as one slice, without gathering. What that wastes
behind short requests is bounded: requests are admitted by tokens (see `torch_engine`).

Decision: the cache grows. If it had room for the longest context of all rows at once, it would take 30 GB for a model
of 0.6B parameters and 256 requests of 1,024 tokens. It grows layer by layer, so that only one layer is held twice at a
time.

Legend: R rows, L columns, K key-value heads, D head size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rollouts_core.inference.tiles import round_up


class LayerShape(NamedTuple):
    heads: int
    key_size: int
    value_size: int

    @property
    def per_token(self) -> int:
        """Numbers kept of a token."""
        return self.heads * (self.key_size + self.value_size)


class CacheRows:
    """Holds no rows to begin with."""

    def __init__(self, shapes: Sequence[LayerShape], dtype: torch.dtype, device: torch.device) -> None:
        self._shapes, self._dtype, self._device = tuple(shapes), dtype, device
        self.rows = self.columns = 0
        self.grown = 0
        """How often all of it has moved to another place in memory."""
        self.layers = [self._empty(shape, 0, 0) for shape in self._shapes]
        """Keys RKLD and values RKLD of each layer, one behind the other in memory."""

    @property
    def bytes_per_token(self) -> int:
        return sum(shape.per_token for shape in self._shapes) * self._dtype.itemsize

    @torch.inference_mode()
    def make_room(self, rows: int, columns: int, most_rows: int, most_columns: int, most_tokens: int) -> None:
        """Grow the cache to so many rows and columns at least, and keep its content. A size that is too small
        doubles, up to `most_rows` or `most_columns`. It stays within `most_tokens` if what is needed fits in that."""
        if rows <= self.rows and columns <= self.columns:
            return
        rows_wanted, columns_wanted = self.rows, self.columns
        if rows > self.rows:
            rows_wanted = max(rows, min(2 * self.rows, most_rows))
        if columns > self.columns:
            columns_wanted = max(round_up(columns), min(2 * self.columns, round_up(most_columns)))
        if rows_wanted * columns_wanted > most_tokens:
            rows_wanted, columns_wanted = rows, round_up(columns)
        for number, (old, shape) in enumerate(zip(self.layers, self._shapes, strict=True)):
            new = self._empty(shape, rows_wanted, columns_wanted)
            kept, used = min(self.rows, rows_wanted), min(self.columns, columns_wanted)
            for old_part, new_part in zip(old, new, strict=True):
                new_part[:kept, :, :used] = old_part[:kept, :, :used]
            self.layers[number] = new
        self.rows, self.columns, self.grown = rows_wanted, columns_wanted, self.grown + 1

    @torch.inference_mode()
    def copy_row(self, source: int, target: int, length: int) -> None:
        """Give `target` the first `length` columns of `source`."""
        for layer in self.layers:
            for part in layer:
                part[target, :, :length] = part[source, :, :length]

    def _empty(self, shape: LayerShape, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros, since padding may be looked at with no weight, and nothing times not-a-number is not nothing."""
        sizes = (shape.key_size, shape.value_size)
        numbers = [rows * shape.heads * columns * size for size in sizes]
        whole = torch.zeros(sum(numbers), dtype=self._dtype, device=self._device)
        keys, values = (
            part.view(rows, shape.heads, columns, size)
            for part, size in zip(torch.split(whole, numbers), sizes, strict=True)
        )
        return keys, values
