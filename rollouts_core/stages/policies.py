"""The model that a stage begins with."""

from typing import Any

from rollouts_core.stages.specs import DPOSpec, EvaluateSpec, RLSpec
from rollouts_core.stages.workspace import Work
from rollouts_core.training.models import initial_policy, load_hf_model


def first_policy(work: Work, spec: DPOSpec | RLSpec | EvaluateSpec, tokenizer: Any) -> Any:
    """The policy of an input artifact; without one the config's model, before any training."""
    if "policy" in work.inputs:
        return load_hf_model(str(work.inputs["policy"] / "policy"), spec.dtype, work.device)
    return untrained_policy(work, spec, tokenizer)


def untrained_policy(work: Work, spec: DPOSpec | RLSpec | EvaluateSpec, tokenizer: Any) -> Any:
    """The config's model, before any stage."""
    assert spec.model is not None, "the planner names the model where no artifact holds the policy"
    external = work.stage.external.get("model")
    return initial_policy(spec.model, external, tokenizer, spec.max_length, spec.seed, work.device)
