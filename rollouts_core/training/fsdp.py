"""Sharded training: FSDP2 over the ranks of a job, driven by rank 0.

Decision: ranks share the work pass by pass. Rank 0 queues passes until each rank has one, or until a result is asked
for; a rank without one computes an empty pass, for shards are gathered by all together. Gradients are summed, never
averaged: every pass is already divided by what the whole optimizer step has, so the number of ranks changes nothing.

Parameters are float32 shards, and are gathered in the type of the computation; gradients are reduced in float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rollouts_core.errors import NonFiniteGradient
from rollouts_core.training.backend import (
    ImmediateTrainFuture,
    LossFunction,
    Metrics,
    TokenScores,
    TrainBatch,
    TrainFuture,
    Weights,
)
from rollouts_core.training.lora import adapter_tensors
from rollouts_core.training.policy import Policy, PolicyOptions, create_policy
from rollouts_core.training.pytorch import Optimization, PyTorchTrainingBackend, create_pytorch_backend
from rollouts_core.training.ranks import Ranks, empty_batch, receive_batch, send_batch

T = TypeVar("T")


def create_backend(
    model: Any,
    loss_function: LossFunction,
    optimization: Optimization,
    ranks: Ranks | None = None,
    **options: Unpack[PolicyOptions],
) -> "FSDPTrainingBackend | PyTorchTrainingBackend":
    """On one device, or sharded over ranks; `options` are those of either."""
    if ranks is None:
        return create_pytorch_backend(model, loss_function, optimization, **options)
    return create_fsdp_backend(model, loss_function, optimization, ranks, **options)


def create_fsdp_backend(
    model: Any,
    loss_function: LossFunction,
    optimization: Optimization,
    ranks: Ranks,
    **options: Unpack[PolicyOptions],
) -> "FSDPTrainingBackend | PyTorchTrainingBackend":
    """On rank 0 what trains, on the others what `serve` takes. Every rank calls it with a model of the same shapes; the
    weights are rank 0's. Raises `BadInput` as `create_policy` does."""
    dtype = next(model.parameters()).dtype
    policy = create_policy(model, **options)
    shard(policy, ranks, dtype)
    own = PyTorchTrainingBackend(policy, loss_function, optimization, dtype)
    return FSDPTrainingBackend(ranks, own) if ranks.rank == 0 else own


def shard(policy: Policy, ranks: Ranks, dtype: torch.dtype) -> None:
    """Make the policy, which each rank has whole and on its device, rank 0's; keep a shard of it."""
    policy.float()
    with torch.no_grad():
        for value in policy.parameters():
            dist.broadcast(value, 0)
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layers = set(policy.model._no_split_modules or ())
    for module in [module for module in policy.modules() if type(module).__name__ in layers]:
        fully_shard(module, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other


class FSDPTrainingBackend:
    """Rank 0's side. Fits `TrainingBackend`."""

    def __init__(self, ranks: Ranks, own: PyTorchTrainingBackend) -> None:
        self._ranks, self._own = ranks, own
        self._queue: list[_Queued[Any]] = []
        self._passes: list[TrainBatch] = []
        """Those of the step under way, of all ranks."""

    @property
    def weight_version(self) -> int:
        return self._own.weight_version

    @property
    def parallel_passes(self) -> int:
        return self._ranks.size

    @property
    def peak_flops(self) -> float | None:
        """Ranks on one CPU share it."""
        one = self._own.peak_flops
        return one if one is None or self._ranks.device.type == "cpu" else one * self._ranks.size

    def forward_backward(self, batch: TrainBatch) -> "_Queued[Metrics]":
        return self._queued("pass", batch)

    def score(self, batch: TrainBatch) -> "_Queued[TokenScores]":
        return self._queued("score", batch)

    def optim_step(self) -> ImmediateTrainFuture[Metrics]:
        """Raises `NonFiniteGradient` with the passes of all ranks."""
        self.flush()
        passes, self._passes = self._passes, []
        self._ranks.tell({"do": "step"})
        try:
            return self._own.optim_step()
        except NonFiniteGradient as error:
            raise NonFiniteGradient(str(error), passes) from None

    def get_weights(self) -> ImmediateTrainFuture[Weights]:
        self.flush()
        self._ranks.tell({"do": "weights"})
        return self._own.get_weights()

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> ImmediateTrainFuture[None]:
        self._own.check_weights(weights)
        self._ranks.tell({"do": "load_weights"})
        return self._own.load_weights(weights)

    def save(self, directory: Path) -> TrainFuture[None]:
        self._ranks.tell({"do": "save", "directory": str(directory)})
        return self._own.save(directory)

    def load(self, directory: Path) -> None:
        self._ranks.tell({"do": "load", "directory": str(directory)})
        self._own.load(directory)

    def save_adapter(self, directory: Path) -> None:
        self._ranks.tell({"do": "gather_adapter"})
        self._own.save_adapter(directory)

    def flush(self) -> None:
        """Have what is queued computed."""
        queue, self._queue = self._queue, []
        if not queue:
            return
        kind = queue[0].kind
        self._ranks.tell({"do": kind, "passes": len(queue)})
        for rank, entry in enumerate(queue[1:], 1):
            send_batch(self._ranks, rank, entry.batch)
        if kind == "pass":
            self._passes += [entry.batch for entry in queue]
            queue[0].found = self._own.forward_backward(queue[0].batch).result()
            for rank, entry in enumerate(queue[1:], 1):
                entry.found = self._ranks.receive(rank)[0]
        else:
            queue[0].found = self._own.score(queue[0].batch).result()
            for rank, entry in enumerate(queue[1:], 1):
                entry.found = TokenScores(**self._ranks.receive(rank)[1])

    def _queued(self, kind: str, batch: TrainBatch) -> "_Queued[Any]":
        if self._queue and self._queue[0].kind != kind:
            self.flush()
        entry: _Queued[Any] = _Queued(self, kind, batch)
        self._queue.append(entry)
        if len(self._queue) == self._ranks.size:
            self.flush()
        return entry


@dataclass
class _Queued(Generic[T]):
    """Fits `TrainFuture`."""

    backend: FSDPTrainingBackend
    kind: str
    batch: TrainBatch
    found: Any = field(default=None)

    def result(self, timeout: float | None = None) -> T:
        if self.found is None:
            self.backend.flush()
        value: T = self.found
        return value


def serve(ranks: Ranks, own: PyTorchTrainingBackend) -> dict[str, Any]:
    """Another rank's side: do what rank 0 tells, until it says something else, which is returned."""
    while (message := ranks.hear())["do"] in _DOES:
        _DOES[message["do"]](ranks, own, message)
    own.wait_until_saved()
    return message


def _pass(ranks: Ranks, own: PyTorchTrainingBackend, message: Mapping[str, Any]) -> None:
    if ranks.rank < message["passes"]:
        ranks.send(0, own.forward_backward(receive_batch(ranks)).result(), {})
    else:
        own.empty_pass(empty_batch())


def _score(ranks: Ranks, own: PyTorchTrainingBackend, message: Mapping[str, Any]) -> None:
    mine = ranks.rank < message["passes"]
    scores = own.score(receive_batch(ranks) if mine else empty_batch()).result()
    if mine:
        ranks.send(0, {}, {name: value for name, value in scores._asdict().items() if value is not None})


def _step(ranks: Ranks, own: PyTorchTrainingBackend, message: Mapping[str, Any]) -> None:
    try:
        own.optim_step()
    except NonFiniteGradient:
        """Rank 0 raises it, too, and says what follows."""


def _load_weights(ranks: Ranks, own: PyTorchTrainingBackend, message: Mapping[str, Any]) -> None:
    own.load_weights({name: torch.empty(shape) for name, shape in own.names.items()})


def _at(method: str, ranks: Ranks, own: PyTorchTrainingBackend, message: Mapping[str, Any]) -> None:
    getattr(own, method)(Path(message["directory"]))


_DOES: dict[str, Any] = {
    "pass": _pass,
    "score": _score,
    "step": _step,
    "weights": lambda ranks, own, message: own.get_weights(),
    "gather_adapter": lambda ranks, own, message: adapter_tensors(own.unwrap()),
    "load_weights": _load_weights,
    "save": partial(_at, "save"),
    "load": partial(_at, "load"),
}
