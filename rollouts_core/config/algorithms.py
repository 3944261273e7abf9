"""The algorithms of reinforcement learning that a config can name, each with its own knobs and no others.

Formulas and their sources are in `training/advantages.py` and `training/losses.py`; `training/algorithms.py` says which
of them an algorithm uses. Imports no torch, because plans read this file.
"""

from typing import Annotated, Literal

from pydantic import Field

from rollouts_core.config.schema import Operational, one_of, part

__all__ = [
    "CISPO",
    "DAPO",
    "GRPO",
    "GSPO",
    "PPO",
    "RLOO",
    "CustomAlgorithm",
    "Distillation",
    "DrGRPO",
    "MaxRL",
    "ReinforcePlusPlus",
]
"""The names that configs can import from `rollouts_core.config`."""

Low = Annotated[float, Field(ge=0, lt=1, description="Ratios below 1 - clip_low are clipped.")]
High = Annotated[float, Field(ge=0, description="Ratios above 1 + clip_high are clipped.")]


@part
class GRPO:
    """Group-relative policy optimization: rewards by their group's mean and standard deviation, clipped ratios."""

    kind: Literal["grpo"] = "grpo"
    clip_low: Low = 0.2
    clip_high: High = 0.2
    normalize_std: bool = Field(default=True, description="Divide advantages by their group's standard deviation.")
    aggregation: Literal["token", "sequence"] = Field(
        default="token", description="Mean of tokens, or the paper's mean of answer means."
    )


@part
class DrGRPO:
    """GRPO without its two biases: no division by standard deviation or by answer length."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    clip_low: Low = 0.2
    clip_high: High = 0.2


@part
class DAPO:
    """GRPO with a higher upper clip, mean of tokens and a soft punishment of length. Its dynamic sampling is the filter
    `check_reward_nonzero_std` with `over_sampling_factor` above 1."""

    kind: Literal["dapo"] = "dapo"
    clip_low: Low = 0.2
    clip_high: High = 0.28
    overlong_tokens: int = Field(
        default=0,
        ge=0,
        description="Answers whose length is within this many tokens of max_new_tokens lose up to 1 of their reward.",
    )


@part
class GSPO:
    """GSPO (arXiv 2507.18071): each answer has one ratio, the geometric mean over its tokens. So the clip is narrow."""

    kind: Literal["gspo"] = "gspo"
    clip_low: Low = 3e-4
    clip_high: High = 4e-4


@part
class CISPO:
    """Ratios are clipped as weights of the gradient, so no token loses its own."""

    kind: Literal["cispo"] = "cispo"
    weight_low: float = Field(default=0.0, ge=0, description="Smallest weight (1 - eps_low in the paper).")
    weight_high: float = Field(default=5.0, gt=0, description="Largest weight (1 + eps_high in the paper).")


@part
class RLOO:
    """REINFORCE with the mean of the others of its group as each answer's baseline."""

    kind: Literal["rloo"] = "rloo"


@part
class ReinforcePlusPlus:
    """Rewards normalised over the whole batch, clipped ratios; the KL penalty is best taken as a reward."""

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    clip_low: Low = 0.2
    clip_high: High = 0.2
    group_baseline: bool = Field(default=False, description="Subtract the group's mean first.")


@part
class MaxRL:
    """Maximum-likelihood RL: rewards by their group's mean, for rewards of 0 and 1."""

    kind: Literal["maxrl"] = "maxrl"
    clip_low: Low = 0.2
    clip_high: High = 0.2


@part
class PPO:
    """Proximal policy optimization: a critic on the policy's trunk, generalized advantages, clipped ratios."""

    kind: Literal["ppo"] = "ppo"
    clip_low: Low = 0.2
    clip_high: High = 0.2
    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount per token.")
    lam: float = Field(default=0.95, ge=0, le=1, description="Lambda of GAE: trades bias for variance.")
    value_coef: float = Field(default=0.1, ge=0, description="Weight of the critic's loss.")
    value_clip: float = Field(default=0.2, gt=0, description="Largest change of a value from the old one.")


@part
class Distillation:
    """On-policy distillation: each token is worth how much likelier a teacher finds it. The reward is only logged."""

    kind: Literal["distillation"] = "distillation"
    teacher: Operational[str] = Field(
        min_length=1,
        description="A directory or hub name; or the address of a server (SGLang, vLLM) with the policy's tokenizer.",
    )
    revision: Operational[str | None] = Field(default=None, description="Branch, tag or commit of a hub name.")


@part
class CustomAlgorithm:
    """Advantages by a function of one's own: samples of the step in, one number per sample (or per token) out."""

    kind: Literal["custom"] = "custom"
    function: str = Field(description="'file.py:function' or 'package.module:function'.")
    clip_low: Low = 0.2
    clip_high: High = 0.2
    aggregation: Literal["token", "sequence"] = Field(default="token", description="Mean of tokens, or answer means.")


Algorithm = Annotated[
    GRPO | DrGRPO | DAPO | GSPO | CISPO | RLOO | ReinforcePlusPlus | MaxRL | PPO | Distillation | CustomAlgorithm,
    Field(discriminator="kind", json_schema_extra=one_of),
]
GROUP_ALGORITHMS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "maxrl")
"""Algorithms that compare an answer with the others of its group; they learn nothing from a group of one."""
