"""Generation with any transformers model that has the Cache interface, for models that `fused` does not know.

Decision: attention is ours, as in training; the rest is the model's own code. So the same function computes windows,
soft caps and sinks in both, and keys and values are stored in `CacheRows`. A model is refused if its layers do not pass
a pass's keyword arguments on to their attention.

Legend: B rows of this forward pass, T new tokens, K key-value heads, D head size, L cached columns in use, V
vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import Cache

from rollouts_core.errors import BadInput
from rollouts_core.inference.attention import Scores, attend, use_attention
from rollouts_core.inference.cache_rows import CacheRows, LayerShape
from rollouts_core.inference.devices import to_device
from rollouts_core.inference.routing import Routing, routers_of
from rollouts_core.inference.tiles import TILE, round_up
from rollouts_core.inference.weights import stored

NAME = "rollouts_cached"


class CachedDecoder:
    """Prefills and decodes rows with the model's own forward pass. Fits `torch_engine.Decoder`."""

    def __init__(self, model: Any, length: int) -> None:
        """Raises `BadInput` where the model's attention can't be ours."""
        use_attention(model, NAME, "rows", _mix)
        self._model = model
        first = next(model.parameters())
        self.device = first.device
        self.weights = {name: value.detach() for name, value in stored(model).items()}
        self._routing: Routing | None = None
        self.cache = CacheRows(_layer_shapes(model), first.dtype, first.device)

    def prefill(self, sequences: Sequence[Sequence[int]], first_row: int) -> torch.Tensor:
        """Sequences are padded on the left, so that each one's last token stands in the last column."""
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        longest = round_up(int(lengths.max()))
        tokens_BT = torch.zeros((len(sequences), longest), dtype=torch.long)
        for row, sequence in enumerate(sequences):
            tokens_BT[row, longest - len(sequence) :] = torch.tensor(sequence)
        positions_BT = torch.arange(longest)[None] - (longest - lengths)[:, None]
        return self._forward(tokens_BT, positions_BT, first_row, len(sequences))

    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        padding = round_up(len(tokens)) - len(tokens)
        tokens_B1 = torch.tensor([*tokens, *[0] * padding])[:, None]
        positions_B1 = torch.tensor([*positions, *[-1] * padding])[:, None]
        return self._forward(tokens_B1, positions_B1, 0, len(tokens))

    def tell_experts(self) -> bool:
        """Make `experts` available from now on. False if this model's routers can't be read."""
        routers = routers_of(self._model)
        self._routing = Routing(routers) if routers else None
        return self._routing is not None

    def experts(self, lengths: Sequence[int]) -> list[bytes]:
        """The experts that the last tokens of each row went through in the last pass; `lengths`: tokens of each row."""
        assert self._routing is not None, "it was asked to tell"
        if not self._routing.is_known:
            raise BadInput(
                f"engine.replay_experts: routers of {self._model.config.model_type} do not tell their choices"
            )
        rows_NR = self._routing.rows().cpu()
        self._routing.forget()
        rows_BTR = rows_NR.view(self._rows, -1, rows_NR.shape[1])
        return [rows_BTR[row, -length:].numpy().tobytes() for row, length in enumerate(lengths)]

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, own in self.weights.items():
                own.copy_(weights[name])

    def _forward(self, tokens_BT: torch.Tensor, positions_BT: torch.Tensor, first_row: int, count: int) -> torch.Tensor:
        """Logits BV behind the last column of the first `count` rows. Negative positions are padding."""
        self._rows = len(tokens_BT)
        logits_BTV: torch.Tensor = self._model(
            input_ids=to_device(tokens_BT, self.device),
            position_ids=to_device(positions_BT.clamp(min=0), self.device),
            past_key_values=_Pass(self.cache, positions_BT[:count], first_row, self.device),
            rows=_Rows(positions_BT[:count], self.device),
            use_cache=True,
            logits_to_keep=min(tokens_BT.shape[1], TILE),
        ).logits
        return logits_BTV[:count, -1]


class _Rows:
    """The columns that each token of a pass sees; the same for all layers with one window."""

    def __init__(self, positions_BT: torch.Tensor, device: torch.device) -> None:
        """`positions_BT`: on the CPU."""
        self._positions_BT1 = to_device(positions_BT.clamp(min=0)[..., None], device)
        self.count = len(positions_BT)
        self._columns_L = torch.arange(round_up(int(positions_BT.max()) + 1), device=device)
        self._allowed: dict[int | None, torch.Tensor] = {}

    def allowed(self, window: int | None) -> torch.Tensor:
        """B1TL"""
        if window not in self._allowed:
            allowed_BTL = self._columns_L <= self._positions_BT1
            if window is not None:
                allowed_BTL = allowed_BTL & (self._columns_L > self._positions_BT1 - window)
            self._allowed[window] = allowed_BTL[:, None]
        return self._allowed[window]


class _Pass(Cache):  # type: ignore[misc]
    """The cache that transformers' layers use in a forward pass over the rows."""

    def __init__(self, cache: CacheRows, positions_BT: torch.Tensor, first_row: int, device: torch.device) -> None:
        """`positions_BT`: on the CPU."""
        super().__init__(layers=[])
        self._cache, self._first, self._count = cache, first_row, len(positions_BT)
        self._used = round_up(int(positions_BT.max()) + 1)
        rows, columns = torch.nonzero(positions_BT >= 0, as_tuple=True)
        places = (rows, columns, rows + first_row, positions_BT[rows, columns])
        rows, columns, into_rows, into_columns = (to_device(place, device) for place in places)
        self._real, self._places = (rows, columns), (into_rows, into_columns)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write BKTD keys and values, return BKLD views of all that these rows hold."""
        rows = slice(self._first, self._first + self._count)
        for cached, fresh in zip(self._cache.layers[layer_idx], (key_states, value_states), strict=True):
            cached.transpose(1, 2).index_put_(self._places, fresh.transpose(1, 2)[self._real])
        keys, values = self._cache.layers[layer_idx]
        return keys[rows, :, : self._used], values[rows, :, : self._used]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._used


class _Shapes(Cache):  # type: ignore[misc]
    """Notes what each layer would keep of one token."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.found: dict[int, LayerShape] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.found[layer_idx] = LayerShape(key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


@torch.inference_mode()
def _layer_shapes(model: Any) -> list[LayerShape]:
    """Found by a pass of one token: configs say it in too many ways."""
    device, shapes = next(model.parameters()).device, _Shapes()
    first = torch.zeros((1, 1), dtype=torch.long, device=device)
    rows = _Rows(torch.zeros((1, 1), dtype=torch.long), device)
    model(input_ids=first, position_ids=first, past_key_values=shapes, rows=rows, use_cache=True)
    if sorted(shapes.found) != list(range(len(shapes.found))) or not shapes.found:
        raise BadInput(f"{model.config.model_type} has layers without keys and values, which are not cached here")
    return [shapes.found[number] for number in sorted(shapes.found)]


def _mix(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: _Rows, scores: Scores) -> torch.Tensor:
    """Rows that are padding get zeros."""
    allowed = rows.allowed(scores.window)[..., : key.shape[2]]
    mixed = attend(query[: rows.count], key, value, allowed, scores)
    return F.pad(mixed, (0, 0, 0, 0, 0, 0, 0, len(query) - rows.count))
