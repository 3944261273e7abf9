"""Sharded training: FSDP2 over the ranks of a job, driven by rank 0.

Decision: ranks share the work pass by pass. Rank 0 queues passes until each rank has one, or until a result is asked
for. A rank without a pass computes an empty one, since gathering shards needs all ranks. Gradients are summed, never
averaged: each pass is already divided by the normalizer of the whole optimizer step, so the number of ranks changes
nothing.

"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, Unpack

import torch

from rollouts_core.errors import NonFiniteGradient
from rollouts_core.inference.weights import LazyWeights
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
from rollouts_core.training.origins import Origin
from rollouts_core.training.policy import Policy, PolicyOptions, create_policy
from rollouts_core.training.pytorch import Optimization, PyTorchTrainingBackend, create_pytorch_backend, score
from rollouts_core.training.ranks import Ranks, empty_batch, receive_batch, send_batch
from rollouts_core.training.sharding import fill, shard, sharded_policy

T = TypeVar("T")


def create_backend(
    model: Any,
    loss_function: LossFunction,
    optimization: Optimization,
    ranks: Ranks | None = None,
    origin: Origin | None = None,
    **options: Unpack[PolicyOptions],
) -> "FSDPTrainingBackend | PyTorchTrainingBackend":
    """A backend on one device, or sharded over ranks. Both take the same `options`."""
    if ranks is None:
        return create_pytorch_backend(model, loss_function, optimization, **options)
    return create_fsdp_backend(model, loss_function, optimization, ranks, origin, **options)


def create_fsdp_backend(
    model: Any,
    loss_function: LossFunction,
    optimization: Optimization,
    ranks: Ranks,
    origin: Origin | None = None,
    **options: Unpack[PolicyOptions],
) -> "FSDPTrainingBackend | PyTorchTrainingBackend":
    """A sharded backend: rank 0 trains with it, the others give it to `serve`. All ranks pass a model of equal shapes:
    a blank one, which gets the weights of its `origin`, or a whole one, which gets rank 0's.

    Raises `BadInput` as `create_policy` and `Origin.weights` do.
    """
    dtype = next(model.parameters()).dtype
    policy = create_policy(model, **options)
    if not optimization.offloaded:
        policy.float()
    shard(policy, ranks, dtype)
    if origin is not None:
        fill(policy, origin, ranks)
    own = PyTorchTrainingBackend(policy, loss_function, optimization, dtype)
    return FSDPTrainingBackend(ranks, own) if ranks.rank == 0 else own


class FSDPTrainingBackend:
    """Rank 0's side. Fits `TrainingBackend`."""

    def __init__(self, ranks: Ranks, own: PyTorchTrainingBackend) -> None:
        self._ranks, self._own = ranks, own
        self._reference: Policy | None = None
        self._queue: list[_Queued[Any]] = []
        self._passes: list[TrainBatch] = []
        """Passes of the current step, of all ranks."""

    @property
    def weight_version(self) -> int:
        return self._own.weight_version

    @property
    def parallel_passes(self) -> int:
        return self._ranks.groups

    @property
    def peak_flops(self) -> float | None:
        """Ranks on one CPU share it."""
        one = self._own.peak_flops
        return one if one is None or self._ranks.device.type == "cpu" else one * self._ranks.size

    def forward_backward(self, batch: TrainBatch) -> "_Queued[Metrics]":
        return self._queued("pass", batch)

    def score(self, batch: TrainBatch) -> "_Queued[TokenScores]":
        return self._queued("score", batch)

    def referring_to(self, origin: Origin, temperature: float) -> "Callable[[TrainBatch], _Queued[TokenScores]]":
        """A function that scores tokens under a frozen policy, of which each rank holds a shard. There is one at a
        time."""
        self._ranks.tell({"do": "build_reference", "origin": asdict(origin), "temperature": temperature})
        self._reference = sharded_policy(origin, temperature, self._ranks)
        return partial(self._queued, "refer")

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
        """Gathered one at a time, when they are asked for."""
        self.flush()
        return ImmediateTrainFuture(LazyWeights(self._own.names, self._gather))

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

    def _gather(self, name: str) -> torch.Tensor:
        self._ranks.tell({"do": "gather", "name": name})
        return self._own.gather(name)

    def flush(self) -> None:
        """Compute everything in the queue."""
        queue, self._queue = self._queue, []
        if not queue:
            return
        kind = queue[0].kind
        self._ranks.tell({"do": kind, "passes": len(queue)})
        together = self._ranks.together
        for rank in range(1, len(queue) * together):
            send_batch(self._ranks, rank, queue[rank // together].batch)
        if kind == "pass":
            self._passes += [entry.batch for entry in queue]
            queue[0].found = self._own.forward_backward(queue[0].batch).result()
            for group, entry in enumerate(queue[1:], 1):
                entry.found = self._ranks.receive(group * together)[0]
        else:
            queue[0].found = self._scored(kind, queue[0].batch)
            for group, entry in enumerate(queue[1:], 1):
                entry.found = TokenScores(**self._ranks.receive(group * together)[1])

    def _scored(self, kind: str, batch: TrainBatch) -> TokenScores:
        if kind == "score":
            return self._own.score(batch).result()
        assert self._reference is not None, "what scores under a reference has built it"
        return score(self._reference, batch)

    def _queued(self, kind: str, batch: TrainBatch) -> "_Queued[Any]":
        if self._queue and self._queue[0].kind != kind:
            self.flush()
        entry: _Queued[Any] = _Queued(self, kind, batch)
        self._queue.append(entry)
        if len(self._queue) == self._ranks.groups:
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


@dataclass
class _Helper:
    """What another rank than 0 has."""

    ranks: Ranks
    own: PyTorchTrainingBackend
    reference: Policy | None = None


def serve(ranks: Ranks, own: PyTorchTrainingBackend) -> dict[str, Any]:
    """Another rank's side: do what rank 0 tells, until it says something else, which is returned."""
    helper = _Helper(ranks, own)
    while (message := ranks.hear())["do"] in _DOES:
        _DOES[message["do"]](helper, message)
    own.wait_until_saved()
    return message


def _pass(helper: _Helper, message: Mapping[str, Any]) -> None:
    ranks, own = helper.ranks, helper.own
    if ranks.group >= message["passes"]:
        own.empty_pass(empty_batch())
        return
    metrics = own.forward_backward(receive_batch(ranks)).result()
    if ranks.answers:
        ranks.send(0, metrics, {})


def _score(helper: _Helper, message: Mapping[str, Any]) -> None:
    ranks, reference = helper.ranks, helper.reference
    mine = ranks.group < message["passes"]
    batch = receive_batch(ranks) if mine else empty_batch()
    scores = score(reference, batch) if message["do"] == "refer" and reference else helper.own.score(batch).result()
    if mine and ranks.answers:
        ranks.send(0, {}, {name: value for name, value in scores._asdict().items() if value is not None})


def _build_reference(helper: _Helper, message: Mapping[str, Any]) -> None:
    helper.reference = sharded_policy(Origin(**message["origin"]), message["temperature"], helper.ranks)


def _step(helper: _Helper, message: Mapping[str, Any]) -> None:
    try:
        helper.own.optim_step()
    except NonFiniteGradient:
        """Rank 0 raises it, too, and says what follows."""


def _load_weights(helper: _Helper, message: Mapping[str, Any]) -> None:
    names = helper.own.names
    helper.own.load_weights(LazyWeights(names, lambda name: torch.empty(names[name])))


def _at(method: str, helper: _Helper, message: Mapping[str, Any]) -> None:
    getattr(helper.own, method)(Path(message["directory"]))


_DOES: dict[str, Callable[[_Helper, Mapping[str, Any]], object]] = {
    "pass": _pass,
    "score": _score,
    "refer": _score,
    "build_reference": _build_reference,
    "step": _step,
    "gather": lambda helper, message: helper.own.gather(message["name"]),
    "gather_adapter": lambda helper, message: adapter_tensors(helper.own.unwrap()),
    "load_weights": _load_weights,
    "save": partial(_at, "save"),
    "load": partial(_at, "load"),
}
