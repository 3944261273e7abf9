"""Which families of models are computed right here, as far as their configs say it.

Decision: nothing is listed that works. A model whose layers all attend, and take attention from transformers'
interface, is computed as transformers computes it; docs/models.md has the families for which that was compared. Listed
is what is known not to work, so that it is refused by name before anything is loaded. Imports no torch: plans ask.
"""

from collections.abc import Mapping
from typing import Any

LAYERS = {"full_attention", "sliding_attention"}
OWN_ATTENTION = "its layers do not hand on what packed sequences and caches need to know"
REFUSED = dict.fromkeys(("falcon", "nemotron", "stablelm"), OWN_ATTENTION)
"""By model_type, and why."""


def problems_of(config: Mapping[str, Any]) -> list[str]:
    """What of a model's config.json is not computed here; empty for what may be."""
    kind = str(config.get("model_type") or "this model")
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method", "an unnamed method") if isinstance(quantized, Mapping) else quantized
        return [f"its weights are quantised ({method}), which can't be trained; give the model it was made from"]
    if reason := REFUSED.get(kind):
        return [f"{kind} is not supported: {reason}"]
    others = sorted(set(config.get("layer_types") or ()) - LAYERS)
    if others:
        return [f"{kind} has layers of {', '.join(others)}, and only layers that attend are computed here"]
    return []
