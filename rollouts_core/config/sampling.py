"""How answers are drawn, for rollouts and for evaluation."""

from typing import Annotated, Any

from pydantic import Field

NOT_TRUNCATED = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}

TopP = Annotated[
    float, Field(gt=0, le=1, description="Draw from the smallest set of tokens that has this share of the probability.")
]
TopK = Annotated[int, Field(ge=0, description="Draw from this many most likely tokens; 0: all.")]
MinP = Annotated[
    float,
    Field(ge=0, lt=1, description="Draw from tokens with at least this share of the most likely token's probability."),
]
Stop = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    Field(description="Texts that end an answer, in addition to the model's own end; the text is part of the answer."),
]


def truncations(sampling: Any) -> list[str]:
    """The fields of a part that exclude some tokens from being drawn."""
    return [name for name, off in NOT_TRUNCATED.items() if getattr(sampling, name) != off]
