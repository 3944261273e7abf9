"""The single-device backend: a transformers model, an optimizer and a schedule on CPU or CUDA.

Each rank of a sharded backend uses it for its shard (`fsdp.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from rollouts_core.errors import NonFiniteGradient, WeightMismatch
from rollouts_core.inference.weights import stored
from rollouts_core.training.backend import (
    ImmediateTrainFuture,
    LossFunction,
    Metrics,
    TokenScores,
    TrainBatch,
    TrainFuture,
    Weights,
)
from rollouts_core.training.checkpoint import load_training_state, save_training_state
from rollouts_core.training.flops import flops_of, peak_flops
from rollouts_core.training.lora import model_weight, model_weights, save_adapter, weight_shapes
from rollouts_core.training.optimizers import (
    MasterWeights,
    OptimizerName,
    OwnOptimizer,
    clip_gradients,
    create_optimizers,
    set_rate,
)
from rollouts_core.training.packed import padding_of
from rollouts_core.training.pending import PendingMetrics, fetch
from rollouts_core.training.policy import Policy, PolicyOptions, create_policy
from rollouts_core.training.ranks import share_disk
from rollouts_core.training.schedule import Rate
from rollouts_core.training.shard_files import take_from_first


@dataclass(frozen=True)
class Optimization:
    """Settings of the optimizer."""

    learning_rate: float
    optimizer: OptimizerName | OwnOptimizer = "adamw"
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    rate: Rate = lambda step: 1.0
    """The schedule: the factor on the learning rate at each step."""
    offloaded: bool = False
    """Whether moments and float32 weights lie in the host's memory, where the optimizer steps."""


class PyTorchTrainingBackend:
    """Trains one policy on one device."""

    def __init__(
        self, policy: Policy, loss_function: LossFunction, optimization: Optimization, dtype: torch.dtype | None = None
    ) -> None:
        """`dtype`: what weights are given out in; None: as they are."""
        self._policy = policy
        self._dtype = dtype
        self._loss_function = loss_function
        self._optimization = optimization
        self._masters = MasterWeights(policy, optimization.offloaded)
        self._optimizers = create_optimizers(
            optimization.optimizer, self._masters.named, optimization.learning_rate, optimization.weight_decay
        )
        self._device = next(policy.parameters()).device
        self._flops = flops_of(policy.model)
        self._buffers = {name for name, _ in policy.model.named_buffers()}
        self._version = 0
        self._saving: TrainFuture[None] | None = None
        self._saving_group: dist.ProcessGroup | None = None
        self._passes: list[TrainBatch] = []
        """Passes of the current step."""
        self._pending: list[PendingMetrics] = []
        """The metrics of passes that have not been read from the device."""

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def _kept(self) -> dict[str, torch.Tensor]:
        """The weights in a checkpoint: the trained ones, in float32. Frozen weights are read from their origin."""
        balance = self._policy.balance
        moved = {} if balance is None else {f"model.{name}": value for name, value in balance.kept.items()}
        return {**self._masters.named, **moved}

    @property
    def parallel_passes(self) -> int:
        return 1

    @property
    def peak_flops(self) -> float | None:
        return peak_flops(self._device)

    @property
    def names(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the model's weights."""
        return weight_shapes(self._policy.model)

    def forward_backward(self, batch: TrainBatch) -> TrainFuture[Metrics]:
        self._policy.train()
        self._passes.append(batch)
        moved = batch.to(self._device)
        loss, metrics = self._loss_function(self._policy(moved), moved)
        balance, real = self._policy.balance, self._policy.real(batch)
        uneven = balance.loss(real, batch.share, self._policy.context) if balance else None
        if uneven is not None:
            loss, metrics = loss + uneven, {**metrics, "balance_loss_sum": uneven}
        loss.backward()  # type: ignore[no-untyped-call]
        if balance is not None:
            balance.count(real)
        self._masters.take_gradients()
        padding, rows = padding_of(batch.spans, self._device, next(self._policy.parameters()).dtype)
        own = {
            "padding_sum": float(padding),
            "attended_sum": float(rows),
            "row_sum": float(len(batch.tokens_N)),
            "flops_sum": self._flops.of(batch.spans, len(batch.targets_M)),
        }
        pending = PendingMetrics({**metrics, **own})
        self._pending.append(pending)
        return pending

    def empty_pass(self, batch: TrainBatch) -> None:
        """A pass that adds nothing to the gradients."""
        scores = self._policy(batch.to(self._device))
        nothing = torch.stack([value.sum() for value in scores if value is not None]).sum() * 0.0
        nothing.backward()  # type: ignore[no-untyped-call]

    def score(self, batch: TrainBatch) -> ImmediateTrainFuture[TokenScores]:
        return ImmediateTrainFuture(score(self._policy, batch))

    def optim_step(self) -> ImmediateTrainFuture[Metrics]:
        norm = clip_gradients(list(self._masters.named.values()), self._optimization.max_grad_norm)
        passes, self._passes = self._passes, []
        pending, self._pending = self._pending, []
        balance = self._policy.balance
        experts = {} if balance is None else balance.step()
        told_norm, *told = fetch(pending, [norm, *experts.values()])
        if not math.isfinite(told_norm):
            self._clear_gradients()
            raise NonFiniteGradient(f"the gradient's norm is {told_norm} at optimizer step {self._version}", passes)
        learning_rate = set_rate(
            self._optimizers, self._optimization.learning_rate, self._optimization.rate, self._version
        )
        for optimizer in self._optimizers:
            optimizer.step()
        self._clear_gradients()
        self._masters.give_back()
        if balance is not None:
            balance.move_biases()
        self._version += 1
        metrics = {"grad_norm": told_norm, "learning_rate": learning_rate}
        return ImmediateTrainFuture({**metrics, **dict(zip(experts, told, strict=True))})

    def _clear_gradients(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def get_weights(self) -> ImmediateTrainFuture[Weights]:
        weights = model_weights(self._policy.model)
        return ImmediateTrainFuture({name: self._given_out(name, value) for name, value in weights.items()})

    def gather(self, name: str) -> torch.Tensor:
        """A current weight by name. If ranks hold it in shards, all of them call this together."""
        return self._given_out(name, model_weight(self._policy.model, name))

    def _given_out(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Buffers keep their type."""
        return value.to(self._dtype) if self._dtype and name not in self._buffers else value

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> ImmediateTrainFuture[None]:
        self.check_weights(weights)
        with torch.no_grad():
            for name, value in stored(self._policy.model).items():
                take_from_first(value, weights[name])
        self._masters.refresh()
        return ImmediateTrainFuture(None)

    def check_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Raises `WeightMismatch`."""
        if set(self.names) != set(weights):
            raise WeightMismatch(f"weights differ in {sorted(set(self.names) ^ set(weights))[:5]}")

    def save(self, directory: Path) -> TrainFuture[None]:
        self.wait_until_saved()
        if dist.is_initialized() and self._saving_group is None:
            self._saving_group = dist.new_group(backend="gloo")
        scattered = dist.is_initialized() and not share_disk()
        self._saving = save_training_state(
            directory, self._kept, self._optimizers, self._version, self._saving_group, scattered
        )
        return self._saving

    def wait_until_saved(self) -> None:
        """Wait for this rank's part of a checkpoint, which may still be written."""
        if self._saving is not None:
            self._saving.result()
            self._saving = None

    def load(self, directory: Path) -> None:
        scattered = dist.is_initialized() and not share_disk()
        self._version = load_training_state(directory, self._kept, self._optimizers, scattered)
        self._masters.give_back()

    def save_adapter(self, directory: Path) -> None:
        """The adapters alone, as peft reads them."""
        save_adapter(self._policy.model, directory)

    def unwrap(self) -> Any:
        """The transformers model below."""
        return self._policy.model


@torch.no_grad()
def score(policy: Policy, batch: TrainBatch) -> TokenScores:
    """The batch's tokens under a policy; no gradient."""
    device = next(policy.parameters()).device
    scores: TokenScores = policy(batch.to(device))
    if isinstance(policy, FSDPModule):
        policy.reshard()  # a backward pass would have done it; ranks gather weights only where all hold shards
    if policy.balance is not None:
        policy.balance.routing.forget()
    return scores


def create_pytorch_backend(
    model: Any,
    loss_function: LossFunction,
    optimization: Optimization,
    **options: Unpack[PolicyOptions],
) -> PyTorchTrainingBackend:
    """A backend on the model's device; the model is trained in place. Raises `BadInput` as `create_policy` does.

    Examples:
        >>> loss = rc.create_cross_entropy_loss()
        >>> backend = rc.create_pytorch_backend(policy.model, loss, rc.Optimization(learning_rate=1e-4))
        >>> backend.weight_version
        0
    """
    return PyTorchTrainingBackend(create_policy(model, **options), loss_function, optimization)
