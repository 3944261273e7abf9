"""The model that servers are started with."""

from dataclasses import dataclass

from rollouts_core.config import Dtype


@dataclass(frozen=True)
class ServedModel:
    """What the servers load at their start; the trainer gives them its weights before they are asked anything."""

    path: str
    dtype: Dtype
    max_length: int
    has_weights: bool = True
    """Whether they are there to be loaded; otherwise the servers begin with any."""
