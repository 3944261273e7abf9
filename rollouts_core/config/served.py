"""Models that a run asks beside its policy."""

from typing import Literal

from pydantic import Field, model_validator

from rollouts_core.config.engine import EngineConfig
from rollouts_core.config.model import PretrainedModel
from rollouts_core.config.schema import or_raise, part

SCHEME = "served://"


@part
class Served:
    """A judge, a teacher, a reward model: kept by servers of its own while RL and evaluation run, and asked at
    `served://NAME`."""

    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$", max_length=30, description="The name in served://NAME.")
    model: PretrainedModel = Field(description="Hub name or local directory.")
    task: Literal["chat", "score"] = Field(
        default="chat",
        description="chat: it answers. score: it gives a teacher's log-probabilities, or a reward model's scores.",
    )
    max_length: int = Field(default=4096, ge=2, description="Most tokens of a request and its answer together.")
    engine: EngineConfig = Field(
        default_factory=EngineConfig, description="Engine and machines that serve it; embedded: our own server."
    )
    asked_by: tuple[Literal["rl", "evaluate"], ...] = Field(
        default=("rl", "evaluate"), min_length=1, description="The stages that ask it, whose results depend on it."
    )

    @model_validator(mode="after")
    def _fits_its_engine(self) -> "Served":
        problems = []
        if self.engine.replay_experts:
            problems.append("engine.replay_experts is only for the policy that is trained")
        if self.engine.kind == "vllm" and self.task == "score":
            problems.append(
                "task score needs embedded or sglang: vllm does not give log-probabilities of a prompt in the same way"
            )
        if self.engine.kind == "embedded" and self.model.trust_remote_code:
            problems.append("model.trust_remote_code: only sglang and vllm run a served model's own code")
        return or_raise(self, problems)

    @property
    def url(self) -> str:
        return f"{SCHEME}{self.name}"
