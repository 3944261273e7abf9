"""Families of models that can't be trained here, as far as their configs tell.

Decision: this is a list of what is known not to work, so that it is refused by name before anything is loaded. All
other models whose layers attend, through transformers' attention interface, are computed as transformers computes them;
docs/models.md lists the families for which that was compared. Imports no torch, because plans use this.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LAYERS = {"full_attention", "sliding_attention"}
OWN_ATTENTION = "its layers do not hand on what packed sequences and caches need to know"
NO_INTERFACE = "it does not take attention from transformers' interface"
REFUSED = {
    **dict.fromkeys(("nemotron", "stablelm"), OWN_ATTENTION),
    **dict.fromkeys(
        ("bloom", "codegen", "cpmant", "falcon", "gpt_neox_japanese", "gptj", "mpt", "openai-gpt", "xglm"), NO_INTERFACE
    ),
    "doge": "its attention chooses among tokens by learnt masks",
    **dict.fromkeys(("llama4", "llama4_text"), "its attention works on chunks of the context"),
}
"""Model types that are refused, and why."""
NO_DECODERS = (
    "ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
    "ForMultipleChoice",
)  # fmt: skip
"""Ends of the names of architectures that make no text from left to right."""


def is_reward_model(directory: str | Path) -> bool:
    """Whether a model directory has a head that scores, as far as its config says it."""
    config = Path(directory, "config.json")
    architectures = json.loads(config.read_text()).get("architectures") if config.is_file() else []
    return any(name.endswith("ForSequenceClassification") for name in architectures or [])


def problems_of(config: Mapping[str, Any]) -> list[str]:
    """Reasons why the model of a config.json can't be trained here; empty if it can."""
    kind = str(config.get("model_type") or "this model")
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method", "an unnamed method") if isinstance(quantized, Mapping) else quantized
        return [f"its weights are quantised ({method}), which can't be trained; give the model it was made from"]
    if reason := REFUSED.get(kind):
        return [f"{kind} is not supported: {reason}"]
    for architecture in config.get("architectures") or ():
        if architecture.endswith(NO_DECODERS) or config.get("is_encoder_decoder"):
            return [f"{architecture} is not a causal language model, and only those are trained here"]
    others = sorted(set(config.get("layer_types") or ()) - LAYERS)
    if others:
        return [f"{kind} has layers of {', '.join(others)}, and only layers that attend are computed here"]
    return []
