"""Reinforcement learning: its steps, how samples are generated, and what the policy acts in."""

from typing import Literal

from pydantic import Field, model_validator

from rollouts_core.config.algorithms import GROUP_ALGORITHMS, GRPO, Algorithm, Distillation
from rollouts_core.config.sampling import MinP, Stop, TopK, TopP
from rollouts_core.config.schema import Added, Operational, or_raise, part
from rollouts_core.config.training import Optimizer


@part
class EnvironmentConfig:
    """The environment of episodes. It makes an episode's first messages from a row of the (held-out) prompts."""

    name: Operational[str] = Field(
        min_length=1, description="Shipped, 'package.module:function' or 'file.py:function' (or a class)."
    )
    max_turns: int = Field(default=8, ge=1, description="Most answers of the policy in one episode.")
    tool_seconds: Operational[float] = Field(default=30.0, gt=0, description="Deadline of one call of a tool.")


@part
class RolloutsConfig:
    """How samples for RL are generated, and how far they may be behind the weights that they train."""

    generation: Literal["on_policy", "partial", "overlapped"] = Field(
        default="on_policy",
        description="on_policy: all tokens are made with the current weights. partial: answers that are not finished "
        "when a batch is full go on in the next one. overlapped: generation goes on during training.",
    )
    max_staleness: int = Field(
        default=0,
        ge=0,
        description="By how many steps a sample's oldest token may be behind; older samples are dropped.",
    )
    over_sampling_factor: float = Field(
        default=1.0, ge=1, description="Groups that are generated at a time, for each group of the batch."
    )
    filters: tuple[str, ...] = Field(
        default=(),
        description="Which groups are used: names of checks, or 'file.py:function' of a group's samples.",
    )
    correction: Literal["none", "truncate", "mask"] = Field(
        default="none", description="Importance sampling for tokens of older weights or of the engine's kernels."
    )
    ratio_low: float = Field(default=0.5, ge=0, description="mask: tokens with a smaller ratio are left out.")
    ratio_high: float = Field(
        default=2.0, gt=0, description="truncate: the largest ratio. mask: tokens with a larger ratio are left out."
    )
    max_concurrent_samples: Operational[int] = Field(default=1024, ge=1, description="Samples under way at once.")
    sample_seconds: Operational[float] = Field(default=1800.0, gt=0, description="Deadline of one sample.")
    reward_seconds: Operational[float] = Field(default=300.0, gt=0, description="Deadline of scoring one group.")
    batch_seconds: Operational[float] = Field(default=6 * 3600.0, gt=0, description="Deadline of one batch.")
    keep_batches: Operational[bool] = Field(
        default=False, description="Keep every batch as Parquet; `rollouts replay` trains from them."
    )

    @model_validator(mode="after")
    def _staleness_fits(self) -> "RolloutsConfig":
        problems = []
        if self.generation == "on_policy" and self.max_staleness:
            problems.append(f"max_staleness {self.max_staleness} needs generation partial or overlapped")
        if self.generation != "on_policy" and not self.max_staleness:
            problems.append(f"generation {self.generation} needs max_staleness of at least 1")
        if self.ratio_low > 1 or self.ratio_high < 1:
            problems.append(f"the ratios {self.ratio_low} to {self.ratio_high} do not include 1")
        return or_raise(self, problems)


@part
class RLConfig:
    """Reinforcement learning, on-policy unless `minibatches` or `rollouts` say otherwise."""

    steps: Operational[int] = Field(default=100, ge=1, description="Number of rollout batches.")
    steps_per_segment: Operational[int] = Field(
        default=50,
        ge=1,
        description="Steps of a segment. Each segment is an artifact, so more steps keep the segments that exist.",
    )
    batch_size: int = Field(default=32, ge=1, description="Prompts per step.")
    n_samples_per_prompt: int = Field(default=8, ge=1, description="Samples per prompt: the size of a group.")
    algorithm: Algorithm = Field(default_factory=GRPO, description="The algorithm: its advantages and its loss.")
    minibatches: int = Field(default=1, ge=1, description="Optimizer steps for each rollout batch; 1 is on-policy.")
    tokens_per_pass: int = Field(
        default=32768, ge=1, description="Tokens of one forward-backward pass, shared prompts counted once."
    )
    optimizer: Optimizer = "adamw"
    learning_rate: float = Field(default=1e-6, gt=0, description="Learning rate after warm-up.")
    warmup_steps: int = Field(default=0, ge=0, description="Optimizer steps of linear warm-up; constant afterwards.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are clipped to this global norm.")
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature.")
    top_p: Added[TopP] = 1.0
    top_k: Added[TopK] = 0
    min_p: Added[MinP] = 0.0
    stop: Added[Stop] = ()
    max_new_tokens: int = Field(default=256, ge=1, description="Longest answer, in tokens, over all turns.")
    reward: str = Field(default="exact_match", description="Shipped, 'package.module:function' or 'file.py:function'.")
    reward_failure: Literal["stop", "drop", "zero"] = Field(
        default="stop",
        description="What happens when a reward raises, hangs or gives no number: end the run, drop the group, or "
        "count it as 0.",
    )
    kl_coef: float = Field(
        default=0.0, ge=0, description="Weight of the KL divergence from the policy that RL began with."
    )
    kl_as: Literal["loss", "reward"] = Field(
        default="loss", description="loss: a term of the loss. reward: k1 is subtracted from each token's reward."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3", description="Estimator of the loss term; the gradient of k2 is that of the divergence itself."
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus.")
    rollouts: RolloutsConfig = Field(default_factory=RolloutsConfig, description="How samples are generated.")
    log_samples: Operational[int] = Field(
        default=8,
        ge=0,
        description="Samples of each step that are kept in the record and the viewer, group by group: about 14 bytes a "
        "token.",
    )
    checkpoint_every: Operational[int] = Field(default=25, ge=1, description="Steps between checkpoints in a segment.")

    @model_validator(mode="after")
    def _groups_fit(self) -> "RLConfig":
        problems = []
        if self.batch_size % self.minibatches:
            problems.append(f"batch_size {self.batch_size} is not a multiple of minibatches {self.minibatches}")
        if self.algorithm.kind in GROUP_ALGORITHMS and self.n_samples_per_prompt == 1:
            problems.append(f"n_samples_per_prompt 1: {self.algorithm.kind} compares the answers of a group")
        if self.algorithm.kind == "maxrl" and self.kl_coef and self.kl_as == "reward":
            problems.append("kl_as reward makes rewards negative, and maxrl needs them at 0 or more")
        if isinstance(self.algorithm, Distillation):
            problems += _distillation_problems(self.algorithm, self.kl_coef, self.temperature)
        return or_raise(self, problems)


def _distillation_problems(algorithm: Distillation, kl_coef: float, temperature: float) -> list[str]:
    problems = []
    if kl_coef:
        problems.append(f"kl_coef {kl_coef}: distillation has only its teacher as a reference")
    if "://" in algorithm.teacher and temperature != 1:
        problems.append(f"temperature {temperature}: a teacher behind an address scores at 1")
    return problems
