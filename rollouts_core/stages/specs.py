"""The spec of each stage: what its output depends on, apart from its inputs. Imports no torch, as plans use specs."""

from pydantic import Field

from rollouts_core.config import (
    BackendConfig,
    DPOConfig,
    Dtype,
    EngineConfig,
    EnvironmentConfig,
    EvaluationConfig,
    Model,
    Overlong,
    RLConfig,
    Role,
    Served,
    SFTConfig,
    Source,
    TokenizationConfig,
)
from rollouts_core.config.model import TokenizerSpec
from rollouts_core.config.schema import Operational, part


@part
class TokenizeSpec:
    """The tokenizer and the sources; each source's content is an external input of the stage, as is the environment
    that makes prompts of rows."""

    tokenizer: TokenizerSpec
    sources: dict[str, Source]
    """Sources by role: demonstrations, preferences, prompts, heldout; those of a mixture numbered from 1: prompts-1."""
    max_length: int
    overlong: Overlong
    learnt_roles: tuple[Role, ...]
    tokenization: Operational[TokenizationConfig]


@part
class TokenizePartSpec:
    """A part of the shards of a tokenization: every `parts`-th one, from `part` on, which is counted from 0."""

    whole: TokenizeSpec
    part: int
    parts: int


@part
class SFTSpec:
    model: Model
    training: SFTConfig
    backend: BackendConfig
    seed: int
    max_length: int
    weights: tuple[float, ...]
    """Weights of the sources of a mixture; empty without one."""


@part
class DPOSpec:
    model: Model | None = Field(description="The model DPO begins with, where no artifact holds the policy.")
    training: DPOConfig
    backend: BackendConfig
    seed: int
    dtype: Dtype
    max_length: int
    weights: tuple[float, ...]
    """Weights of the sources of a mixture; empty without one."""


@part
class RLSpec:
    """A segment of the RL run: its steps after `start`, up to `stop`."""

    model: Model | None = Field(
        description="The model RL begins with, where no artifact holds it and it is needed: for the policy, for a "
        "reference, or below adapters."
    )
    training: RLConfig
    backend: BackendConfig
    engine: EngineConfig
    environment: EnvironmentConfig | None
    seed: int
    start: int
    stop: int
    dtype: Dtype
    max_length: int
    weights: tuple[float, ...]
    """Weights of the sources of a mixture; empty without one."""


@part
class EvaluateSpec:
    """Greedy accuracy of a policy: an input artifact's, or with none the model before training."""

    model: Model | None = Field(description="The model before training, where no artifact holds the policy.")
    evaluation: EvaluationConfig
    environment: EnvironmentConfig | None
    dtype: Dtype
    seed: int
    max_length: int


@part
class ServeSpec:
    """A model beside the policy. Its servers are no artifact; stages that ask them have this one's key in theirs."""

    served: Served

    @property
    def dtype(self) -> Dtype:
        return self.served.model.dtype

    @property
    def max_length(self) -> int:
        return self.served.max_length


def servers_of(spec: "Spec") -> EngineConfig | None:
    """The engine whose servers are beside the stage's job; None where it needs none."""
    match spec:
        case RLSpec():
            engine: EngineConfig | None = spec.engine
        case EvaluateSpec():
            engine = spec.evaluation.engine
        case _:
            engine = None
    return engine if engine is not None and engine.has_servers else None


def served_in(spec: "Spec") -> Served:
    assert isinstance(spec, ServeSpec), "the planner pairs this stage with its spec"
    return spec.served


Spec = TokenizeSpec | TokenizePartSpec | SFTSpec | DPOSpec | RLSpec | EvaluateSpec | ServeSpec
