"""SFT and DPO, and how training uses its devices."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rollouts_core.config.schema import MOST_DEVICES, Added, Operational, or_raise, part

Optimizer = Annotated[
    Literal["adamw", "muon"], Field(description="muon: for the matrices inside the layers; AdamW for the rest.")
]
Schedule = Literal["cosine", "linear", "constant", "stable_then_decay"]
Recomputed = bool | Literal["selective"]
SCHEDULES = "How the learning rate falls to zero after warm-up; stable_then_decay: in the last fifth."


@part
class SFTConfig:
    """Supervised fine-tuning on the demonstrations' assistant spans."""

    steps: int = Field(default=1000, ge=1, description="Optimizer steps.")
    batch_size: int = Field(default=64, ge=1, description="Examples per optimizer step.")
    tokens_per_pass: int = Field(
        default=16384, ge=1, description="Tokens of one forward-backward pass; a step takes as many passes as it needs."
    )
    optimizer: Optimizer = "adamw"
    learning_rate: float = Field(default=2e-5, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up.")
    schedule: Schedule = Field(default="cosine", description=SCHEDULES)
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are clipped to this global norm.")
    log_every: Operational[int] = Field(default=10, ge=1, description="Steps between lines of metrics.")
    checkpoint_every: Operational[int] = Field(default=100, ge=1, description="Steps between checkpoints.")

    @model_validator(mode="after")
    def _steps_add_up(self) -> "SFTConfig":
        return or_raise(self, _warmup_problems(self.warmup_steps, self.steps))


@part
class DPOConfig:
    """Direct preference optimization, against the policy that it begins with."""

    steps: int = Field(default=500, ge=1, description="Optimizer steps.")
    batch_size: int = Field(default=32, ge=1, description="Preferences per optimizer step.")
    beta: float = Field(
        default=0.1, gt=0, description="How strongly the policy is kept close to the one that it begins with."
    )
    tokens_per_pass: int = Field(
        default=16384, ge=1, description="Tokens of one forward-backward pass, shared prompts counted once."
    )
    optimizer: Optimizer = "adamw"
    learning_rate: float = Field(default=1e-6, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up.")
    schedule: Schedule = Field(default="linear", description=SCHEDULES)
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are clipped to this global norm.")
    log_every: Operational[int] = Field(default=10, ge=1, description="Steps between lines of metrics.")
    checkpoint_every: Operational[int] = Field(default=100, ge=1, description="Steps between checkpoints.")

    @model_validator(mode="after")
    def _steps_add_up(self) -> "DPOConfig":
        return or_raise(self, _warmup_problems(self.warmup_steps, self.steps))


def _warmup_problems(warmup_steps: int, steps: int) -> list[str]:
    return [f"warmup_steps {warmup_steps} is not smaller than steps {steps}"] if warmup_steps >= steps else []


@part
class LoRAConfig:
    """Low-rank adapters: the weights stay, and small matrices beside the linear layers are trained."""

    rank: int = Field(default=16, ge=1, description="Rank of the adapters.")
    alpha: float = Field(default=32.0, gt=0, description="The adapters' output is multiplied by alpha / rank.")
    targets: tuple[str, ...] = Field(
        default=(), description="Names of linear layers, for example q_proj; none: all except the head."
    )


@part
class ParallelConfig:
    """How ranks share one pass. What they have of each other's is rounding, so a result does not depend on it."""

    context: Operational[int] = Field(
        default=1,
        ge=1,
        le=MOST_DEVICES,
        description="Number of ranks that share the tokens of a row; for long sequences.",
    )
    tensor: Operational[int] = Field(
        default=1,
        ge=1,
        le=MOST_DEVICES,
        description="Number of ranks that share each layer's weights, experts and the vocabulary.",
    )
    expert: Operational[int] = Field(
        default=1,
        ge=1,
        le=MOST_DEVICES,
        description="Number of ranks that share the experts of a mixture, each with other tokens.",
    )

    def problems_with(self, heads: int, key_heads: int, experts: int | None = None) -> list[str]:
        """Problems of this layout with a model's numbers of heads, and of experts in a layer where that is known."""
        together, holders, problems = self.context * self.tensor, self.expert * self.tensor, []
        if heads % together or key_heads % together:
            problems.append(
                f"backend.parallel: context {self.context} x tensor {self.tensor} must divide the model's "
                f"{heads} heads and its {key_heads} key-value heads"
            )
        if self.expert > 1 and experts == 0:
            problems.append(f"backend.parallel.expert: {self.expert} ranks can't share experts: the model has none")
        elif experts and experts % holders:
            problems.append(
                f"backend.parallel: expert {self.expert} x tensor {self.tensor} must divide the model's {experts} "
                "experts"
            )
        return problems


@part
class BackendConfig:
    """How training uses its device, or devices."""

    parallel: Operational[ParallelConfig] = Field(
        default=ParallelConfig(), description="How ranks share one pass; null: each rank has passes of its own."
    )
    processes: Operational[int] = Field(
        default=1,
        ge=1,
        le=MOST_DEVICES,
        description="Ranks that share the weights (FSDP2), one for each GPU; 1: a single device.",
    )
    lora: LoRAConfig | None = Field(default=None, description="Train adapters instead of the weights.")
    activation_checkpointing: Operational[Recomputed] = Field(
        default=False,
        description="Compute activations again for the gradient: less memory, about a third more time. selective: keep "
        "the results of attention, which takes most of that time in long sequences.",
    )
    compile: Added[bool] = Field(
        default=False, description="Compile each layer's norms and feed-forward part by torch.compile."
    )

    balance_experts: Added[bool] = Field(
        default=False,
        description="Keep the experts of a mixture evenly used, as its family does: by an auxiliary loss or a bias.",
    )
    offload_optimizer: Added[bool] = Field(
        default=False,
        description="Keep the optimizer's state and float32 weights in the host's memory and step there: less GPU "
        "memory, more time.",
    )

    @model_validator(mode="after")
    def _ranks_divide(self) -> "BackendConfig":
        together = self.parallel.context * self.parallel.tensor
        problems = []
        if self.processes % together:
            problems.append(
                f"processes {self.processes} is not a multiple of the {together} ranks that share each pass "
                "(parallel.context x parallel.tensor)"
            )
        elif self.processes // self.parallel.tensor % self.parallel.expert:
            problems.append(
                f"parallel.expert {self.parallel.expert} does not divide the {self.processes // self.parallel.tensor} "
                "ranks with other tokens (processes / parallel.tensor)"
            )
        return or_raise(self, problems)
