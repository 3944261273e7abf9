"""A stage as a value: its name, spec, inputs, and the key that follows from them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from pydantic import TypeAdapter

from rollouts_core.stages.specs import (
    DPOSpec,
    EvaluateSpec,
    RLSpec,
    ServeSpec,
    SFTSpec,
    Spec,
    TokenizePartSpec,
    TokenizeSpec,
)
from rollouts_core.store.identity import External
from rollouts_core.store.keys import canonical, key_of
from rollouts_core.store.manifest import ArtifactId

Kind = Literal["tokenizer", "tokenize_part", "tokenize", "sft", "dpo", "rl", "evaluate", "serve"]

SPECS: Mapping[Kind, type[Spec]] = {
    "tokenizer": TokenizeSpec,
    "tokenize_part": TokenizePartSpec,
    "tokenize": TokenizeSpec,
    "sft": SFTSpec,
    "dpo": DPOSpec,
    "rl": RLSpec,
    "evaluate": EvaluateSpec,
    "serve": ServeSpec,
}

VERSIONS: Mapping[Kind, int] = {
    "tokenizer": 5, "tokenize_part": 5, "tokenize": 5, "sft": 3, "dpo": 1, "rl": 5, "evaluate": 2, "serve": 1,
}  # fmt: skip
"""Bump one when the meaning of that stage's output changes; its artifacts are then made again."""


_external = TypeAdapter(External)


@dataclass(frozen=True)
class Stage:
    """A step that turns inputs and a spec into one artifact."""

    name: str
    kind: Kind
    version: int
    spec: Spec
    inputs: Mapping[str, ArtifactId]
    """Role to input artifact."""
    external: Mapping[str, External]
    """Role to what comes from outside the store."""

    @property
    def artifact(self) -> ArtifactId:
        return ArtifactId(self.name, self.key)

    @cached_property
    def key(self) -> str:
        return key_of(
            {
                "stage": self.kind,
                "version": self.version,
                "spec": self.spec,
                "inputs": {role: artifact.key for role, artifact in self.inputs.items()},
                "external": {role: external.identity for role, external in self.external.items()},
            }
        )

    @property
    def module(self) -> str:
        """The library module whose `run` makes the artifact."""
        return f"rollouts_core.stages.{self.kind}"


def stage_to_data(stage: Stage) -> dict[str, Any]:
    """The whole stage as JSON data, operational fields included, for a job on another machine."""
    return {
        "name": stage.name,
        "kind": stage.kind,
        "version": stage.version,
        "spec": TypeAdapter(SPECS[stage.kind]).dump_python(stage.spec, mode="json"),
        "inputs": {role: asdict(artifact) for role, artifact in stage.inputs.items()},
        "external": {role: asdict(external) for role, external in stage.external.items()},
        "key": stage.key,
    }


def stage_from_data(data: Mapping[str, Any]) -> Stage:
    """The inverse of `stage_to_data`. Raises ValueError when the key no longer follows from the rest."""
    kind: Kind = data["kind"]
    stage = Stage(
        data["name"],
        kind,
        data["version"],
        TypeAdapter(SPECS[kind]).validate_python(data["spec"]),
        {role: ArtifactId(**artifact) for role, artifact in data["inputs"].items()},
        {
            role: External(**{**external, "content": tuple(external["content"])})
            for role, external in data["external"].items()
        },
    )
    if stage.key != data["key"]:
        raise ValueError(f"stage {stage.name}: its key here is {stage.key}, in the job it is {data['key']}")
    return stage


def canonical_spec(stage: Stage) -> dict[str, Any]:
    """The part of the spec that entered the key."""
    spec: dict[str, Any] = canonical(stage.spec)
    return spec
