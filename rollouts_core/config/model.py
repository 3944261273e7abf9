"""The model that training begins with."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rollouts_core.config.schema import Operational, one_of, or_raise, part

Dtype = Literal["float32", "bfloat16"]


@part
class ScratchModel:
    """A small decoder, randomly initialised, with a tokenizer made from the training data."""

    kind: Literal["scratch"] = "scratch"
    architecture: Literal["qwen2", "qwen3", "llama"] = Field(default="qwen2", description="Transformers model family.")
    hidden_size: int = Field(default=128, ge=8, description="Width.")
    layers: int = Field(default=2, ge=1, description="Depth.")
    heads: int = Field(default=4, ge=1, description="Attention heads; they divide the width.")
    kv_heads: int = Field(default=4, ge=1, description="Key-value heads; they divide the heads.")
    intermediate_size: int = Field(default=512, ge=8, description="Width of the feed-forward layers.")
    tokenizer: Literal["character", "byte_bpe"] = Field(default="character", description="Made from the training data.")
    vocab_size: int = Field(default=1024, ge=264, description="Size of a byte_bpe vocabulary.")
    dtype: Dtype = Field(default="float32", description="Type of the weights.")

    @model_validator(mode="after")
    def _heads_divide(self) -> "ScratchModel":
        problems = []
        if self.hidden_size % (2 * self.heads):
            problems.append(f"hidden_size {self.hidden_size} is not a multiple of 2 x heads ({2 * self.heads})")
        if self.heads % self.kv_heads:
            problems.append(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        return or_raise(self, problems)


@part
class PretrainedModel:
    """A model and tokenizer by hub name or local directory, identified by commit or content, not by that name."""

    kind: Literal["pretrained"] = "pretrained"
    name: Operational[str] = Field(
        min_length=1, description="Name on the hub, for example 'Qwen/Qwen3-0.6B', or a local directory."
    )
    revision: Operational[str | None] = Field(default=None, description="Branch, tag or commit; resolved to a commit.")
    dtype: Dtype = Field(default="float32", description="Type of the weights; the optimizer steps in float32.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that comes with the model.")


Model = Annotated[ScratchModel | PretrainedModel, Field(discriminator="kind", json_schema_extra=one_of)]


@part
class TokenizerSpec:
    """Made from the training data, or pretrained: then it is the external input `model`."""

    kind: Literal["character", "byte_bpe", "pretrained"]
    vocab_size: int | None = None
    """Only for byte_bpe."""
    trust_remote_code: bool = False
