"""The number of tokens that a stage puts through its model, and so its amount of work.

Work is the weights' bytes times the tokens that go through them. A stage saves it with its artifact, and later
estimates of time use it.
"""

from collections.abc import Mapping
from pathlib import Path

from rollouts_core.stages.specs import DPOSpec, EvaluateSpec, RLSpec, SFTSpec
from rollouts_core.stages.stage import Stage


def work_of(stage: Stage, rows: Mapping[str, float], places: list[Path]) -> float:
    """`rows`: what tokenization has counted. `places`: directories where the model's files may lie; the first that has
    some counts. 0 where there are none."""
    sizes = (sum(file.stat().st_size for file in place.glob("*.safetensors")) for place in places)
    longest = getattr(stage.spec, "max_length", 0)
    return float(tokens_of(stage, rows, longest) * next((size for size in sizes if size), 0))


def tokens_of(stage: Stage, rows: Mapping[str, float], longest: int) -> int:
    """Tokens that go through the weights: prompts of a group once, answers with their longest length."""
    match stage.spec:
        case SFTSpec():
            sft = stage.spec.training
            return sft.steps * sft.batch_size * mean_length(rows, "demonstrations", longest)
        case DPOSpec():
            training = stage.spec.training
            return training.steps * training.batch_size * 2 * mean_length(rows, "preferences", longest)
        case RLSpec():
            rl = stage.spec.training
            group = mean_length(rows, "prompts", longest) + rl.n_samples_per_prompt * rl.max_new_tokens
            return (stage.spec.stop - stage.spec.start) * rl.batch_size * group
        case EvaluateSpec():
            wanted = stage.spec.evaluation
            prompts = wanted.limit or int(rows.get("heldout/rows", 0))
            each = mean_length(rows, "heldout", longest) + wanted.max_new_tokens
            return prompts * wanted.samples_per_prompt * each
    return 0


def mean_length(rows: Mapping[str, float], role: str, longest: int) -> int:
    """Tokens of a sequence of this role; the longest there may be, where it is not tokenized yet."""
    sequences = sum(count for name, count in rows.items() if name.startswith(role) and name.endswith("/rows"))
    tokens = sum(count for name, count in rows.items() if name.startswith(role) and name.endswith("/tokens"))
    return max(1, round(tokens / sequences)) if sequences else longest
