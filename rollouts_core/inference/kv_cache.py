"""A key-value cache of fixed rows, one running request a row, for models that speak transformers' Cache interface.

Decision: running requests occupy rows 0 to n-1, so that a decoding step reads them as one slice, without gathering.
When a request ends, the last row moves into its place. One spare column beyond the context takes what padding writes;
nothing ever attends to it.

Legend: B rows of this forward pass, T new tokens, H key-value heads, D head size, L cached columns in use.
"""

import torch
from transformers import Cache, PretrainedConfig


class RowCache(Cache):  # type: ignore[misc]
    """Keys and values of up to `rows` requests of up to `length` tokens."""

    def __init__(self, config: PretrainedConfig, rows: int, length: int, dtype: torch.dtype, device: torch.device):
        super().__init__(layers=[])
        heads = config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, rows, length + 1, heads, size)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.length = length
        self._first, self._used = 0, 0
        self._columns_BT = torch.zeros((0, 0), dtype=torch.long, device=device)
        self._rows_B1 = torch.zeros((0, 1), dtype=torch.long, device=device)

    def aim(self, first_row: int, columns_BT: torch.Tensor, used: int) -> None:
        """Say where the next forward pass writes: its rows begin at `first_row`; it then sees `used` columns."""
        self._first, self._used, self._columns_BT = first_row, used, columns_BT
        self._rows_B1 = torch.arange(first_row, first_row + len(columns_BT), device=columns_BT.device)[:, None]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write BHTD keys and values, return BHLD views of all that these rows hold."""
        rows = slice(self._first, self._first + len(self._columns_BT))
        self.keys[layer_idx].index_put_((self._rows_B1, self._columns_BT), key_states.transpose(1, 2))
        self.values[layer_idx].index_put_((self._rows_B1, self._columns_BT), value_states.transpose(1, 2))
        return (
            self.keys[layer_idx, rows, : self._used].transpose(1, 2),
            self.values[layer_idx, rows, : self._used].transpose(1, 2),
        )

    def move_row(self, source: int, target: int) -> None:
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._used
