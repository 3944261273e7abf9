"""How accuracy is measured."""

from pydantic import Field, model_validator

from rollouts_core.config.engine import EngineConfig
from rollouts_core.config.sampling import MinP, Stop, TopK, TopP, truncations
from rollouts_core.config.schema import Added, Operational, or_raise, part


@part
class EvaluationConfig:
    """Answers to the held-out prompts, scored before training and after SFT, DPO and RL; greedy unless `temperature`
    says otherwise."""

    limit: int | None = Field(default=None, ge=1, description="Only the first so many held-out prompts.")
    max_new_tokens: int = Field(default=256, ge=1, description="Longest answer, in tokens, over all turns.")
    reward: str = Field(default="exact_match", description="Scores an answer; 1 or more counts as correct.")
    samples_per_prompt: int = Field(default=1, ge=1, description="Answers to each prompt.")
    temperature: float = Field(default=0.0, ge=0, description="Sampling temperature; 0 is greedy.")
    top_p: Added[TopP] = 1.0
    top_k: Added[TopK] = 0
    min_p: Added[MinP] = 0.0
    stop: Added[Stop] = ()
    pass_at: tuple[int, ...] = Field(default=(), description="Each k of pass@k, at most samples_per_prompt.")
    slices: tuple[str, ...] = Field(
        default=(), description="Columns of the data: results are shown for each of their values."
    )
    failures_allowed: float = Field(
        default=0.01, ge=0, le=1, description="Share of answers that may fail, or fail to be scored."
    )
    engine: Added[EngineConfig | None] = Field(
        default=None, description="The engine that answers; null: the embedded engine, in the evaluation's process."
    )
    during_rl: Operational[bool] = Field(
        default=False, description="Also evaluate the policy of each RL segment, while the next segment is trained."
    )
    reward_seconds: Operational[float] = Field(default=300.0, gt=0, description="Deadline of scoring one prompt.")

    @model_validator(mode="after")
    def _samples_suffice(self) -> "EvaluationConfig":
        problems = [
            f"pass_at {k} is not within 1 to samples_per_prompt {self.samples_per_prompt}"
            for k in self.pass_at
            if not 1 <= k <= self.samples_per_prompt
        ]
        if self.during_rl and self.engine is not None and self.engine.has_servers:
            problems.append("during_rl: evaluations beside RL are answered by the embedded engine; leave out engine")
        if self.samples_per_prompt > 1 and not self.temperature:
            problems.append(f"samples_per_prompt {self.samples_per_prompt}: greedy answers are all the same")
        if not self.temperature:
            problems += [f"{name}: greedy answers take the likeliest token" for name in truncations(self)]
        return or_raise(self, problems)
