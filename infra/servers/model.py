"""The model that servers are started with: the policy, or one beside it."""

from collections.abc import Sequence
from dataclasses import dataclass

from infra.jobs.session import MachineSession
from rollouts_core.config import Dtype
from rollouts_core.errors import BadInput
from rollouts_core.stages.specs import EvaluateSpec, RLSpec, ServeSpec, Spec
from rollouts_core.stages.stage import Stage


@dataclass(frozen=True)
class ServedModel:
    """The model that servers load at their start. They get the trainer's weights before the first request."""

    path: str
    dtype: Dtype
    max_length: int
    has_weights: bool = True
    """Whether the directory has weights; otherwise the servers begin with random ones."""
    name: str = ""
    """The name of a model beside the policy; its weights never change."""
    scores: bool = False
    """Whether the model scores texts, and does not answer."""


def model_of(spec: Spec, path: str, has_weights: bool = True) -> ServedModel:
    """The policy of a stage, or a model beside it, which is loaded with its weights."""
    if isinstance(spec, ServeSpec):
        served = spec.served
        return ServedModel(path, spec.dtype, spec.max_length, True, served.name, served.task == "score")
    assert isinstance(spec, RLSpec | EvaluateSpec), "nothing else has servers"
    return ServedModel(path, spec.dtype, spec.max_length, has_weights)


def to_serve(stages: Sequence[Stage], session: MachineSession) -> list[Stage]:
    """The stages still to be made, one with a model's files first: servers begin with the files of the first.

    Raises `BadInput` where none has any, which is evaluation of nothing but a model made from scratch.
    """
    todo = [stage for stage in stages if not session.has(stage.artifact)]
    todo.sort(key=lambda stage: not _has_files(stage))
    if not _has_files(todo[0]):
        raise BadInput("evaluation.engine: a model from scratch has no files that servers could begin with; train it")
    return todo


def _has_files(stage: Stage) -> bool:
    return "policy" in stage.inputs or "model" in stage.external
