"""The single-device backend: a transformers model, AdamW and a schedule on CPU or CUDA."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from rollouts_core.errors import WeightMismatch
from rollouts_core.training.backend import ImmediateTrainFuture, LossFunction, Metrics, TrainBatch, Weights
from rollouts_core.training.checkpoint import load_training_state, save_training_state
from rollouts_core.training.losses import token_logprobs


class PyTorchTrainingBackend:
    """Trains one policy on one device."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: LambdaLR,
        loss_function: LossFunction,
        max_grad_norm: float,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._loss_function = loss_function
        self._max_grad_norm = max_grad_norm
        self._device = next(model.parameters()).device
        self._version = 0

    @property
    def weight_version(self) -> int:
        return self._version

    def forward_backward(self, batch: TrainBatch) -> ImmediateTrainFuture[Metrics]:
        self._model.train()
        moved = batch.to(self._device)
        loss, metrics = self._loss_function(self._logits(moved), moved)
        loss.backward()  # type: ignore[no-untyped-call]
        return ImmediateTrainFuture(metrics)

    def logprobs(self, batch: TrainBatch, temperature: float) -> ImmediateTrainFuture[torch.Tensor]:
        moved = batch.to(self._device)
        with torch.no_grad():
            return ImmediateTrainFuture(token_logprobs(self._logits(moved), moved.tokens_BT, temperature).cpu())

    def optim_step(self) -> ImmediateTrainFuture[Metrics]:
        norm = nn.utils.clip_grad_norm_(self._model.parameters(), self._max_grad_norm)
        learning_rate = self._scheduler.get_last_lr()[0]
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._version += 1
        return ImmediateTrainFuture({"grad_norm": norm.item(), "learning_rate": float(learning_rate)})

    def get_weights(self) -> ImmediateTrainFuture[Weights]:
        return ImmediateTrainFuture({name: value.detach() for name, value in self._model.named_parameters()})

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> ImmediateTrainFuture[None]:
        own = dict(self._model.named_parameters())
        if set(own) != set(weights):
            raise WeightMismatch(f"weights differ in {sorted(set(own) ^ set(weights))[:5]}")
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(weights[name])
        return ImmediateTrainFuture(None)

    def save(self, directory: Path) -> None:
        save_training_state(directory, self._model, self._optimizer, self._scheduler, self._version)

    def load(self, directory: Path) -> None:
        self._version = load_training_state(directory, self._model, self._optimizer, self._scheduler)

    def unwrap(self) -> nn.Module:
        """The model below."""
        return self._model

    def _logits(self, batch: TrainBatch) -> torch.Tensor:
        logits: torch.Tensor = self._model(
            input_ids=batch.tokens_BT, attention_mask=batch.attention_mask_BT, use_cache=False
        ).logits
        return logits


def create_pytorch_backend(
    model: Any,
    loss_function: LossFunction,
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
    schedule: Any = None,
) -> PyTorchTrainingBackend:
    """A backend with AdamW; `schedule` makes a scheduler of the optimizer, by default a constant one."""
    optimizer = create_adamw_optimizer(model, learning_rate, weight_decay)
    scheduler = schedule(optimizer) if schedule else LambdaLR(optimizer, lambda step: 1.0)
    return PyTorchTrainingBackend(model, optimizer, scheduler, loss_function, max_grad_norm)


def create_adamw_optimizer(model: nn.Module, learning_rate: float, weight_decay: float = 0.0) -> torch.optim.AdamW:
    """AdamW with torch's betas (0.9, 0.999); vectors (norms, biases) are not decayed."""
    matrices = [value for value in model.parameters() if value.ndim >= 2]
    vectors = [value for value in model.parameters() if value.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, foreach=True)
