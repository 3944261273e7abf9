"""A decoder written for generation, for the Llama family: Llama, Qwen2, Qwen3.

Decision: a forward pass of transformers spends most of a small step on Python, on mask making and on many small
operators. Here a layer is two matrix products fewer (q, k, v are one, gate and up are one), one rotation for queries
and keys together, and the key-value cache is read in place. The weights are held once: the names of the checkpoint are
views into the joined matrices, so new weights are copied straight to where they are used.

Activations stand in columns, one a token: matrix products with the weights as they are stored were then a third faster
on the CPU than with rows, and what splits or joins heads and halves is contiguous.

Legend: B rows of this pass, R those that are no padding, T new tokens of each, N tokens of this pass, H query heads, K
key-value heads, G all three kinds of heads, D head size, L columns of the cache, E hidden size, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from rollouts_core.inference.cache_rows import CacheRows, LayerShape
from rollouts_core.inference.devices import to_device
from rollouts_core.inference.recorded import Record, RecordedSteps, recorder, size_of
from rollouts_core.inference.tiles import TILE, round_up

FAMILIES = ("llama", "qwen2", "qwen3")
STATIC_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose angles do not depend on the length at hand."""


@dataclass(frozen=True)
class _Layer:
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    """Qwen3's norms of each query head and each key head."""
    key_norm: torch.Tensor | None
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    before_attention: torch.Tensor
    before_mlp: torch.Tensor


def is_fusable(model: Any) -> bool:
    """Whether `FusedDecoder` computes what this model computes."""
    config: Any = model.config
    plain = config.model_type in FAMILIES and config.hidden_act == "silu" and not getattr(config, "mlp_bias", False)
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    if not plain or set(kinds) != {"full_attention"} or model.model.layers[0].self_attn.o_proj.bias is not None:
        return False
    return getattr(model.model.rotary_emb, "rope_type", "") in STATIC_ROTATIONS


class FusedDecoder:
    """Holds the weights and the key-value cache; takes the model apart. Fits `torch_engine.Decoder`."""

    def __init__(self, model: Any, length: int) -> None:
        config: Any = model.config
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._size = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._eps = config.rms_norm_eps
        self._length = round_up(length)
        self.weights: dict[str, torch.Tensor] = {}
        first = next(model.parameters())
        self.device, dtype = first.device, first.dtype
        self._embedding = self._kept("model.embed_tokens.weight", model.model.embed_tokens.weight)
        self._layers = [self._layer(f"model.layers.{number}", layer) for number, layer in enumerate(model.model.layers)]
        self._norm = self._column("model.norm.weight", model.model.norm.weight)
        tied = config.tie_word_embeddings
        self._head = self._embedding if tied else self._kept("lm_head.weight", model.lm_head.weight)
        with torch.no_grad():
            positions = torch.arange(self._length, device=self.device)[None]
            cos, sin = model.model.rotary_emb(first.new_zeros(1, 1, 1), positions)
        self._cos_DL, self._sin_DL = cos[0].t().contiguous(), sin[0].t().contiguous()
        self._sin_DL[: self._size // 2] *= -1
        shape = LayerShape(self._kv_heads, self._size, self._size)
        self.cache = CacheRows([shape] * len(self._layers), dtype, self.device)
        widths = (config.hidden_size, self._size)
        self._averages = {width: torch.full((TILE, width), 1 / width, device=self.device) for width in widths}
        self._columns_L = torch.arange(self._length, device=self.device)
        self._record = recorder(self.device)
        self._recorded: tuple[int, RecordedSteps] | None = None
        """How often the cache had grown, and the steps recorded over it since."""

    def prefill(self, sequences: Sequence[Sequence[int]], first_row: int) -> torch.Tensor:
        """Read whole sequences into rows from `first_row` on; logits BV after each one's last token.

        Padding is on the right: what it writes is overwritten before anything may look at it.
        """
        count, longest = len(sequences), round_up(max(map(len, sequences)))
        tokens_BT = torch.zeros((count, longest), dtype=torch.long)
        for row, sequence in enumerate(sequences):
            tokens_BT[row, : len(sequence)] = torch.tensor(sequence)
        rows = slice(first_row, first_row + count)
        cos_DN, sin_DN = (table[:, :longest].repeat(1, count) for table in (self._cos_DL, self._sin_DL))
        hidden_EN = self._embedded(to_device(tokens_BT.flatten(), self.device))
        for layer, (keys, values) in zip(self._layers, self.cache.layers, strict=True):
            heads_BGTD = self._heads_of(layer, hidden_EN, cos_DN, sin_DN).view(-1, self._size, count, longest)
            heads_BGTD = heads_BGTD.permute(2, 0, 3, 1)
            query, key, value = torch.split(heads_BGTD, [self._heads, self._kv_heads, self._kv_heads], dim=1)
            keys[rows, :, :longest], values[rows, :, :longest] = key, value
            mixed_BHTD = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=self._heads != self._kv_heads
            )
            self._rest(layer, hidden_EN, mixed_BHTD.permute(1, 3, 0, 2).reshape(-1, count * longest))
        last_B = torch.tensor([row * longest + len(sequence) - 1 for row, sequence in enumerate(sequences)])
        return self._logits(hidden_EN[:, to_device(last_B, self.device)], count)

    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Add a token to each of rows 0 to B-1, at its own position. Returns logits BV."""
        if self._record is not None:
            return self._play(tokens, positions, self._record)
        count = len(tokens)
        padding = [0] * (round_up(count) - count)
        tokens_B, positions_B = (
            to_device(torch.tensor([*given, *padding]), self.device) for given in (tokens, positions)
        )
        return self._step(tokens_B, positions_B, round_up(max(positions) + 1), count)[:count]

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, own in self.weights.items():
                own.copy_(weights[name])

    def _play(self, tokens: Sequence[int], positions: Sequence[int], record: Record) -> torch.Tensor:
        """`decode` by recorded steps. Padding stands in rows that are free, where it may write."""
        if self._recorded is None or self._recorded[0] != self.cache.grown:
            steps = RecordedSteps(self._step, record, self.cache.rows, len(self._head), self._head)
            self._recorded = self.cache.grown, steps
        padding = [0] * (min(size_of(len(tokens)), self.cache.rows) - len(tokens))
        tokens_B, positions_B = (torch.tensor([*given, *padding]) for given in (tokens, positions))
        used = min(size_of(max(positions) + 1), self.cache.columns)
        return self._recorded[1](tokens_B, positions_B, used)[: len(tokens)]

    def _step(
        self, tokens_B: torch.Tensor, positions_B: torch.Tensor, used: int, rows: int | None = None
    ) -> torch.Tensor:
        """Logits BV over `used` columns. Attention is computed for the first `rows`, all by default."""
        count = len(tokens_B) if rows is None else rows
        mask_R11L = torch.zeros((count, 1, 1, used), dtype=self._embedding.dtype, device=self.device)
        unseen_RL = self._columns_L[:used] > positions_B[:count, None]
        mask_R11L.masked_fill_(unseen_RL[:, None, None], float("-inf"))
        rows_R = torch.arange(count, device=self.device)
        cos_DB, sin_DB = self._cos_DL[:, positions_B], self._sin_DL[:, positions_B]
        hidden_EB = self._embedded(tokens_B)
        for layer, (keys, values) in zip(self._layers, self.cache.layers, strict=True):
            heads_RGD = self._heads_of(layer, hidden_EB, cos_DB, sin_DB)[..., :count].permute(2, 0, 1).contiguous()
            query, key, value = torch.split(heads_RGD, [self._heads, self._kv_heads, self._kv_heads], dim=1)
            keys.transpose(1, 2).index_put_((rows_R, positions_B[:count]), key)
            values.transpose(1, 2).index_put_((rows_R, positions_B[:count]), value)
            mixed_RKGD = F.scaled_dot_product_attention(
                torch.unflatten(query, 1, (self._kv_heads, -1)),
                keys[:count, :, :used],
                values[:count, :, :used],
                attn_mask=mask_R11L,
            )
            self._rest(layer, hidden_EB, F.pad(mixed_RKGD.flatten(1), (0, 0, 0, len(tokens_B) - count)).t())
        return self._logits(hidden_EB, len(tokens_B))

    def _embedded(self, tokens_N: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens_N, self._embedding).t().contiguous()

    def _heads_of(
        self, layer: _Layer, hidden_EN: torch.Tensor, cos_DN: torch.Tensor, sin_DN: torch.Tensor
    ) -> torch.Tensor:
        """GDN: the rotated query heads, the rotated key heads, the value heads."""
        normed_EN = self._normed(hidden_EN, layer.before_attention)
        joined = layer.qkv @ normed_EN if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, layer.qkv, normed_EN)
        heads_GDN = joined.view(-1, self._size, hidden_EN.shape[1])
        turned = heads_GDN[: -self._kv_heads]
        if layer.query_norm is not None and layer.key_norm is not None:
            turned = self._scaled(turned)
            turned[: self._heads] *= layer.query_norm
            turned[self._heads :] *= layer.key_norm
        half = self._size // 2
        swapped = torch.cat((turned[:, half:], turned[:, :half]), dim=1)
        torch.addcmul(turned * cos_DN, swapped, sin_DN, out=heads_GDN[: -self._kv_heads])
        return heads_GDN

    def _rest(self, layer: _Layer, hidden_EN: torch.Tensor, mixed_EN: torch.Tensor) -> None:
        """The rest of a layer, after attention: added to `hidden_EN` in place."""
        hidden_EN.addmm_(layer.out, mixed_EN)
        gate, up = (layer.gate_up @ self._normed(hidden_EN, layer.before_mlp)).chunk(2)
        hidden_EN.addmm_(layer.down, F.silu(gate).mul_(up))

    def _normed(self, hidden_EN: torch.Tensor, weight_E1: torch.Tensor) -> torch.Tensor:
        return self._scaled(hidden_EN).mul_(weight_E1)

    def _scaled(self, columns_EN: torch.Tensor) -> torch.Tensor:
        """Columns by their root mean square. The mean is a matrix product: sums over columns change bits with N."""
        wide = columns_EN.float()
        mean_1N = (self._averages[wide.shape[-2]] @ wide.square())[..., :1, :]
        return (wide * torch.rsqrt(mean_1N + self._eps)).to(columns_EN.dtype)

    def _logits(self, hidden_EB: torch.Tensor, count: int) -> torch.Tensor:
        """Columns are padded to a tile, like everywhere."""
        if missing := -hidden_EB.shape[1] % TILE:
            hidden_EB = F.pad(hidden_EB, (0, missing))
        return (self._head @ self._normed(hidden_EB, self._norm)).t()[:count]

    def _layer(self, name: str, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = {part: getattr(attention, f"{part}_proj") for part in "qkv"}
        qkv = self._joined({f"{name}.self_attn.{p}_proj.weight": m.weight for p, m in projections.items()})
        bias = None
        if attention.q_proj.bias is not None:
            bias = self._joined({f"{name}.self_attn.{p}_proj.bias": m.bias for p, m in projections.items()})[:, None]
        return _Layer(
            qkv,
            bias,
            self._head_norm(f"{name}.self_attn.q_norm.weight", getattr(attention, "q_norm", None)),
            self._head_norm(f"{name}.self_attn.k_norm.weight", getattr(attention, "k_norm", None)),
            self._kept(f"{name}.self_attn.o_proj.weight", attention.o_proj.weight),
            self._joined(
                {f"{name}.mlp.{part}_proj.weight": getattr(mlp, f"{part}_proj").weight for part in ("gate", "up")}
            ),
            self._kept(f"{name}.mlp.down_proj.weight", mlp.down_proj.weight),
            self._column(f"{name}.input_layernorm.weight", layer.input_layernorm.weight),
            self._column(f"{name}.post_attention_layernorm.weight", layer.post_attention_layernorm.weight),
        )

    def _joined(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        joined = torch.cat([part.detach() for part in parts.values()])
        begin = 0
        for name, part in parts.items():
            self.weights[name] = joined[begin : begin + len(part)]
            begin += len(part)
        return joined

    def _kept(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        self.weights[name] = weight.detach()
        return self.weights[name]

    def _column(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        return self._kept(name, weight)[:, None]

    def _head_norm(self, name: str, norm: Any) -> torch.Tensor | None:
        return None if norm is None else self._column(name, norm.weight)
