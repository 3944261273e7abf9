"""How large a model is, by its files' headers or by its config; and what a pass over tokens holds."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from rollouts_core.config import PretrainedModel, ScratchModel
from rollouts_core.config.training import Recomputed
from rollouts_core.inference.published import header_of
from rollouts_core.store.identity import External

FLOAT32 = 4


@dataclass(frozen=True)
class ModelSize:
    """Numbers, not bytes."""

    parameters: int
    vocabulary: int
    hidden: int
    layers: int
    intermediate: int
    query: int
    """All query heads together."""
    keys: int
    """All key heads together; values have as many."""
    bytes_each: int
    """Bytes of a weight."""
    experts: int = 1
    """In each layer; `intermediate` is the width of those that a token goes through, together."""
    chosen: int = 0
    """For a mixture: how many experts a token goes through."""

    @property
    def weights(self) -> int:
        """Bytes."""
        return self.parameters * self.bytes_each

    def per_token(self, again: Recomputed = False, compiled: bool = False, on_gpu: bool = False) -> int:
        """Numbers that a training pass keeps of a token for the gradient.

        A layer keeps 4 for each of the feed-forward width, 6 for each of the width, 3 for each of queries and 2 for
        each of keys, by what autograd saves; outside the layers it is 15 of the width. A mixture's layer keeps 2 of the
        width for each expert that a token goes through. What is compiled keeps one
        feed-forward width and two of the width less. A CPU's allocator and padded attention take 5.5 for each of
        queries and keys, measured as the peak of Llamas with one width after another changed. Where activations are
        computed `again`, each layer's input is kept, or its attention's result as well, and one layer's activations.
        """
        feed, width = (3, 4) if compiled else (4, 6)
        query, keys = (3.0, 2.0) if on_gpu else (5.5, 5.5)
        layer = feed * self.intermediate + width * self.hidden + query * self.query + keys * self.keys
        layer += 2 * self.chosen * self.hidden
        if not again:
            return round(self.layers * layer + 15 * self.hidden)
        kept = self.hidden + (self.query if again == "selective" else 0)
        return round(self.layers * kept + layer + 15 * self.hidden)

    def gathered(self, tensor: int, expert: int) -> int:
        """Parameters that each rank gathers at once: a layer's, or those that are in none."""
        if self.experts == 1:
            in_layers = min(self.in_layers, self.parameters)
            return max(in_layers // max(1, self.layers), self.parameters - in_layers) // tensor
        layer = (self.parameters - self._outside) // max(1, self.layers)
        attention = 2 * self.hidden * (self.query + self.keys)
        return max(attention // tensor + (layer - attention) // (tensor * expert), self._outside // tensor)

    @property
    def _outside(self) -> int:
        """Weights of the embeddings, and of the head where it has its own."""
        return 2 * self.vocabulary * self.hidden

    def share(self, tensor: int) -> "ModelSize":
        """The sizes of one rank's share of each layer, among `tensor` ranks."""
        return replace(
            self,
            intermediate=self.intermediate // tensor,
            query=self.query // tensor,
            keys=self.keys // tensor,
            vocabulary=self.vocabulary // tensor,
        )

    @property
    def in_layers(self) -> int:
        """Weights of the layers' matrices."""
        return sum(entering * leaving for entering, leaving in self._linear.values()) * self.layers

    def adapters(self, rank: int, targets: Sequence[str]) -> int:
        """Weights of adapters of this rank to the linear layers with these names; none: to all."""
        chosen = [shape for name, shape in self._linear.items() if not targets or name in targets]
        return sum(rank * (entering + leaving) for entering, leaving in chosen) * self.layers

    @property
    def _linear(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a layer's linear layers, by most families' names; experts are none of them."""
        wide, query, keys = self.hidden, self.query, self.keys
        feed = self.intermediate
        attention = {
            "q_proj": (wide, query), "k_proj": (wide, keys), "v_proj": (wide, keys), "o_proj": (query, wide),
        }  # fmt: skip
        if self.experts > 1:
            return attention
        return attention | {"gate_proj": (wide, feed), "up_proj": (wide, feed), "down_proj": (feed, wide)}

    @property
    def cache_per_token(self) -> int:
        """Bytes of keys and values."""
        return 2 * self.layers * self.keys * self.bytes_each


def size_of(model: ScratchModel | PretrainedModel, external: External | None, vocabulary: int | None) -> ModelSize:
    """`vocabulary`: of a model from scratch, where its tokenizer is there already.

    Raises LookupError, with the reason, where a model's files are not here.
    """
    if isinstance(model, ScratchModel):
        return _scratch(model, vocabulary or (model.vocab_size if model.tokenizer == "byte_bpe" else 64))
    assert external is not None, "the planner identifies a pretrained model"
    return size_in(_directory(external), model.dtype)


def size_in(directory: Path, dtype: str) -> ModelSize:
    """The size of the model in a directory, computed in `dtype`."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    shapes: dict[str, tuple[int, ...]] = {}
    for file in directory.glob("*.safetensors"):
        found = header_of(file)
        shapes |= found if isinstance(found, dict) else {}
    heads = config.get("num_attention_heads") or config.get("n_head") or 1
    hidden = config.get("hidden_size") or config.get("n_embd") or 0
    each = config.get("head_dim") or hidden // heads
    experts = config.get("num_experts") or config.get("n_routed_experts") or config.get("num_local_experts") or 1
    wide, chosen = config.get("moe_intermediate_size"), config.get("num_experts_per_tok") or 1
    return ModelSize(
        parameters=sum(prod(shape) for shape in shapes.values()),
        vocabulary=config.get("vocab_size") or 0,
        hidden=hidden,
        layers=config.get("num_hidden_layers") or config.get("n_layer") or 0,
        intermediate=chosen * wide if experts > 1 and wide else config.get("intermediate_size") or 4 * hidden,
        query=heads * each,
        keys=(config.get("num_key_value_heads") or heads) * each,
        bytes_each=2 if dtype == "bfloat16" else FLOAT32,
        experts=experts,
        chosen=chosen if experts > 1 else 0,
    )


def _scratch(model: ScratchModel, vocabulary: int) -> ModelSize:
    width, keys = model.hidden_size, model.hidden_size // model.heads * model.kv_heads
    attention = 2 * width * width + 2 * width * keys
    layer = attention + 3 * width * model.intermediate_size + 2 * width
    return ModelSize(
        parameters=vocabulary * width + model.layers * layer + width,
        vocabulary=vocabulary,
        hidden=width,
        layers=model.layers,
        intermediate=model.intermediate_size,
        query=width,
        keys=keys,
        bytes_each=2 if model.dtype == "bfloat16" else FLOAT32,
    )


def _directory(external: External) -> Path:
    if Path(external.location).is_dir():
        return Path(external.location)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(external.location, revision=external.identity["commit"], local_files_only=True))
    except LocalEntryNotFoundError:
        raise LookupError(f"{external.location} is not on this machine yet") from None
