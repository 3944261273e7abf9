"""New weights to every engine."""

from collections.abc import Sequence
from pathlib import Path

from rollouts_core.inference.engine import InferenceEngine
from rollouts_core.training.backend import TrainingBackend


def sync_weights(backend: TrainingBackend, engines: Sequence[InferenceEngine]) -> None:
    """Give engines in this process the trainer's current weights under the trainer's weight version."""
    weights = backend.get_weights().result()
    for engine in engines:
        engine.update_weights(weights, backend.weight_version)


def sync_weights_to_engines(engines: Sequence[InferenceEngine], checkpoint_path: Path, version: int) -> None:
    """Give engines the weights of a Hugging Face model directory."""
    for engine in engines:
        engine.update_weights_from_checkpoint(checkpoint_path, version)
