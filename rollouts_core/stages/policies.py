"""The model that a stage begins with."""

from typing import Any

from rollouts_core.config import Dtype, ScratchModel
from rollouts_core.stages.specs import DPOSpec, EvaluateSpec, RLSpec, SFTSpec
from rollouts_core.stages.workspace import Work
from rollouts_core.training.origins import Origin, origin_in, scratch_origin


def first_policy(work: Work, spec: DPOSpec | RLSpec | EvaluateSpec, tokenizer: Any, device: str = "") -> Any:
    """The policy of an input artifact; without one the config's model, before any training. By default on the job's
    device."""
    if "policy" in work.inputs:
        return origin_in(work.inputs["policy"] / "policy", spec.dtype).whole(device or work.device)
    return model_origin(work, spec, tokenizer).whole(device or work.device)


def trained_origin(work: Work, spec: SFTSpec | DPOSpec | RLSpec, tokenizer: Any) -> Origin:
    """Origin of the weights that the stage trains, or adds its adapters to: RL's stay where RL began, whatever was
    added."""
    adapters_go_on = isinstance(spec, RLSpec) and spec.start > 0 and spec.backend.lora is not None
    if "policy" in work.inputs and not adapters_go_on:
        return origin_in(work.inputs["policy"] / "policy", dtype_of(spec))
    return beginning_origin(work, spec, tokenizer)


def beginning_origin(work: Work, spec: SFTSpec | DPOSpec | RLSpec, tokenizer: Any) -> Origin:
    """Origin of the policy that RL began with; without one, of the config's model."""
    if "reference" in work.inputs:
        return origin_in(work.inputs["reference"] / "policy", dtype_of(spec))
    return model_origin(work, spec, tokenizer)


def model_origin(work: Work, spec: SFTSpec | DPOSpec | RLSpec | EvaluateSpec, tokenizer: Any) -> Origin:
    """Origin of the config's model, before any stage."""
    model = spec.model
    assert model is not None, "the planner names the model where no artifact holds the policy"
    if isinstance(model, ScratchModel):
        return scratch_origin(model, tokenizer, spec.max_length, spec.seed)
    external = work.stage.external["model"]
    return origin_in(external.location, model.dtype, external.identity.get("commit"), model.trust_remote_code)


def start(work: Work, origin: Origin) -> Any:
    """The model itself: whole, or blank where ranks share its weights, which the backend then fills in."""
    return origin.blank() if work.session.ranks else origin.whole(work.device)


def dtype_of(spec: SFTSpec | DPOSpec | RLSpec) -> Dtype:
    """The type of the weights that are computed with."""
    return spec.model.dtype if isinstance(spec, SFTSpec) else spec.dtype
