"""Generation with any transformers model that speaks the Cache interface, for those `fused` does not know.

Decision: a request is a row of the cache, so that a decoding step reads rows as one slice, without gathering. One spare
column beyond the context takes what padding writes; nothing ever attends to it.

Legend: B rows of this forward pass, T new tokens, H key-value heads, D head size, L cached columns in use, V
vocabulary.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from transformers import Cache, PretrainedConfig

from rollouts_core.inference.tiles import TILE, round_up


class CachedDecoder:
    """Prefills and decodes rows with the model's own forward pass. Fits `torch_engine.Decoder`."""

    def __init__(self, model: nn.Module, rows: int, length: int) -> None:
        self._model = model
        first = next(model.parameters())
        self.device = first.device
        self.weights = {name: value.detach() for name, value in model.named_parameters()}
        self._cache = RowCache(model.config, round_up(rows), round_up(length), first.dtype, first.device)

    def prefill(self, sequences: Sequence[Sequence[int]], first_row: int) -> torch.Tensor:
        """Sequences are padded on the left, so that each one's last token stands in the last column."""
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        longest = round_up(int(lengths.max()))
        tokens_BT = torch.zeros((len(sequences), longest), dtype=torch.long)
        for row, sequence in enumerate(sequences):
            tokens_BT[row, longest - len(sequence) :] = torch.tensor(sequence)
        positions_BT = torch.arange(longest)[None] - (longest - lengths)[:, None]
        return self._forward(tokens_BT, positions_BT, first_row)

    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        padding = round_up(len(tokens)) - len(tokens)
        tokens_B1 = torch.tensor([*tokens, *[0] * padding])[:, None]
        positions_B1 = torch.tensor([*positions, *[-1] * padding])[:, None]
        return self._forward(tokens_B1, positions_B1, 0)[: len(tokens)]

    def copy_row(self, source: int, target: int, length: int) -> None:
        self._cache.copy_row(source, target)

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, own in self.weights.items():
                own.copy_(weights[name])

    def _forward(self, tokens_BT: torch.Tensor, positions_BT: torch.Tensor, first_row: int) -> torch.Tensor:
        """Logits BV behind the last column. Negative positions are padding."""
        positions_BT = positions_BT.to(self.device)
        used = round_up(int(positions_BT.max()) + 1)
        padding_BT = positions_BT < 0
        self._cache.aim(first_row, positions_BT.masked_fill(padding_BT, self._cache.length), used)
        visible_BTL = torch.arange(used, device=self.device) <= positions_BT.clamp(min=0)[..., None]
        dtype = self._cache.keys.dtype
        mask_B1TL = torch.zeros(visible_BTL.shape, dtype=dtype, device=self.device)
        mask_B1TL = mask_B1TL.masked_fill(~visible_BTL, torch.finfo(dtype).min)[:, None]
        logits_BTV: torch.Tensor = self._model(
            input_ids=tokens_BT.to(self.device),
            position_ids=positions_BT.clamp(min=0),
            attention_mask=mask_B1TL,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=min(tokens_BT.shape[1], TILE),
        ).logits
        return logits_BTV[:, -1]


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

    def copy_row(self, source: int, target: int) -> None:
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._used
