"""How answers are drawn, for rollouts and for evaluation."""

from typing import Annotated, Any

from pydantic import Field

NOT_TRUNCATED = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}

TopP = Annotated[
    float, Field(gt=0, le=1, description="Draw from the fewest tokens that have this share of the probability.")
]
TopK = Annotated[int, Field(ge=0, description="Draw from so many likeliest tokens; 0 is all.")]
MinP = Annotated[
    float,
    Field(ge=0, lt=1, description="Draw from tokens with at least this share of the likeliest's probability."),
]
Stop = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    Field(description="Texts that end an answer, besides the model's own end; each belongs to the answer."),
]


def truncations(sampling: Any) -> list[str]:
    """Those fields of a part by which some tokens are never drawn."""
    return [name for name, off in NOT_TRUNCATED.items() if getattr(sampling, name) != off]
