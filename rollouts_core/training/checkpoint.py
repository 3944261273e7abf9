"""Training state on disk, without pickle: tensors as safetensors, the rest as JSON.

Decision: a single device writes one safetensors file, each rank writes one with its shards (`shard_files.py`), and each
reads the blocks that it needs from any of them. So a checkpoint can be loaded by another number of ranks.

Decision: ranks on several hosts without a common disk send their shards to rank 0 while they train. So a checkpoint is
complete on one host: a lost host takes no part of it with it, and other hosts can continue from it. Writing a part on
each host would be faster, but a part without all others is worth nothing.

Decision: a checkpoint is a directory that is written under a temporary name and renamed when it is complete. So a
directory with a checkpoint's name is always complete, even if a process died while it wrote one.

Decision: training waits while its state is copied, not while it is written. A thread that ends with its owner writes
one checkpoint at a time. An error of the thread is raised at the next checkpoint.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rollouts_core.errors import BadInput
from rollouts_core.training.backend import LazyTrainFuture, TrainFuture
from rollouts_core.training.shard_files import block_of, local, save_shards, stored_state, take_from_first
from rollouts_core.training.weight_files import StoredWeight

STATE = "state"
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
KEEP = 2
"""Checkpoints kept: the last, and the one before it."""


class Checkpoints:
    """A stage's checkpoints. `with Checkpoints(directory) as checkpoints`: leaving waits for what is being written."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._writer = ThreadPoolExecutor(1)
        self._writing: Future[int] | None = None
        self._completed: int | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        self._writer.shutdown(wait=True)
        if kind is None:
            self._wait()

    def begin(self, step: int, save: Callable[[Path], TrainFuture[None]]) -> None:
        """Begin the checkpoint of a step: `save` takes what is to be kept, and its future writes it.

        Waits for the one before; raises what its writing raised.
        """
        self._wait()
        unfinished = _unfinished(self._parent, step)
        self._writing = self._writer.submit(_written, self._parent, step, unfinished, save(unfinished))

    def completed(self) -> int | None:
        """The step of a checkpoint that has become complete since this was last asked."""
        if self._writing is not None and self._writing.done():
            self._wait()
        step, self._completed = self._completed, None
        return step

    def _wait(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            self._completed = writing.result()


def _written(parent: Path, step: int, unfinished: Path, saving: TrainFuture[None]) -> int:
    saving.result()
    _complete(parent, step, unfinished)
    return step


def _unfinished(parent: Path, step: int) -> Path:
    unfinished = parent / f".step-{step:08d}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


def _complete(parent: Path, step: int, unfinished: Path) -> None:
    """Make it the checkpoint of that step; older ones go."""
    for path in unfinished.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    final = parent / f"step-{step:08d}"
    shutil.rmtree(final, ignore_errors=True)
    unfinished.rename(final)
    for old in sorted(parent.glob("step-*"))[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)


def last_checkpoint(parent: Path) -> tuple[int, Path] | None:
    """The step and directory of the last complete checkpoint."""
    found = sorted(parent.glob("step-*"))
    return (int(found[-1].name.removeprefix("step-")), found[-1]) if found else None


def save_training_state(
    directory: Path,
    weights: Mapping[str, torch.Tensor],
    optimizers: Sequence[Optimizer],
    version: int,
    group: dist.ProcessGroup | None = None,
    scattered: bool = False,
) -> TrainFuture[None]:
    """Weights, optimizers' moments, torch's RNG and the weight version, which is also the schedule's position.

    They are copied at once, and written behind training. Every rank calls it, with its shards and a `group` that is
    used for nothing else, and asks for the result. `scattered`: rank 0 alone has the directory.
    """
    state, rng = _state(weights, optimizers), _rng()
    details = {"optimizers": [type(optimizer).__name__ for optimizer in optimizers], "weight_version": version}
    finish = partial(_finish, directory, rng, details)
    if group is None:
        copied = {name: value.to("cpu", copy=True).contiguous() for name, value in state.items()}
        return LazyTrainFuture(partial(_write_whole, directory, copied, finish))
    return save_shards(directory / STATE, state, group, scattered, finish)


def _write_whole(directory: Path, state: Mapping[str, torch.Tensor], finish: Callable[[], None]) -> None:
    (directory / STATE).mkdir()
    save_file(dict(state), directory / STATE / "whole.safetensors")
    finish()


def _finish(directory: Path, rng: Mapping[str, torch.Tensor], details: Mapping[str, Any]) -> None:
    save_file(dict(rng), directory / "rng.safetensors")
    (directory / "training.json").write_text(json.dumps(details))


def load_training_state(
    directory: Path, weights: Mapping[str, torch.Tensor], optimizers: Sequence[Optimizer], scattered: bool = False
) -> int:
    """Take up what `save_training_state` wrote, on any number of ranks; returns the weight version.

    `scattered`: rank 0 alone has the directory. Raises `BadInput` when it is of another model or of other optimizers.
    """
    if scattered:
        return _load_scattered(directory, weights, optimizers)
    details: dict[str, Any] = json.loads((directory / "training.json").read_text())
    version: int = details["weight_version"]
    _begin_moments(optimizers, version)
    state, kept = _state(weights, optimizers), stored_state(directory / STATE)
    _check_same(directory, kept, state, details["optimizers"], optimizers)
    with torch.no_grad():
        for name, own in state.items():
            local(own).copy_(kept[name][1][block_of(own)])
    _set_rng(load_file(directory / "rng.safetensors"))
    return version


def _load_scattered(directory: Path, weights: Mapping[str, torch.Tensor], optimizers: Sequence[Optimizer]) -> int:
    """Rank 0 reads tensor after tensor, and each rank takes its shards. Only rank 0 raises."""
    rank_zero = dist.get_rank() == 0
    details: dict[str, Any] = json.loads((directory / "training.json").read_text()) if rank_zero else {}
    told = torch.tensor([details.get("weight_version", 0)])
    dist.broadcast(told, 0)
    version = int(told)
    _begin_moments(optimizers, version)
    state, kept = _state(weights, optimizers), stored_state(directory / STATE)
    if rank_zero:
        _check_same(directory, kept, state, details["optimizers"], optimizers)
    with torch.no_grad():
        for name, own in state.items():
            everything = tuple(slice(0, size) for size in own.shape)
            read = kept[name][1][everything] if rank_zero else torch.empty(own.shape)
            take_from_first(own, read)
    if rank_zero:
        _set_rng(load_file(directory / "rng.safetensors"))
    return version


def whole(value: torch.Tensor) -> torch.Tensor:
    """A shard's whole tensor; every rank asks for it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _state(weights: Mapping[str, torch.Tensor], optimizers: Sequence[Optimizer]) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by name. They share memory with those that are trained."""
    names = {value: name for name, value in weights.items()}
    state = {f"weights.{name}": value.detach() for name, value in weights.items()}
    for optimizer in optimizers:
        for parameter, entries in optimizer.state.items():
            for entry, value in entries.items():
                if entry in MOMENTS:
                    state[f"{entry}.{names[parameter]}"] = value
    return state


def _begin_moments(optimizers: Sequence[Optimizer], version: int) -> None:
    """The moments that a step would have made, for those that have made none."""
    for optimizer in optimizers:
        kinds = ("momentum_buffer",) if isinstance(optimizer, torch.optim.Muon) else ("exp_avg", "exp_avg_sq")
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            entries = optimizer.state[parameter]
            for kind in kinds if version else ():
                entries.setdefault(kind, torch.zeros_like(parameter))
            if version and not isinstance(optimizer, torch.optim.Muon):
                entries["step"] = torch.tensor(float(version), device=parameter.device)


def _check_same(
    directory: Path,
    stored: Mapping[str, tuple[tuple[int, ...], StoredWeight]],
    state: Mapping[str, torch.Tensor],
    names: Sequence[str],
    optimizers: Sequence[Optimizer],
) -> None:
    kept = {name: shape for name, (shape, _) in stored.items()}
    trained = {name.partition(".")[2] for name in kept if name.startswith(MOMENTS)}
    if trained:  # earlier releases also saved frozen weights
        kept = {name: shape for name, shape in kept.items() if name.partition(".")[2] in trained or name in state}
    own = {name: tuple(value.shape) for name, value in state.items()}
    problems = [
        f"{name} is {kept.get(name, 'not there')}, and the model's is {own.get(name, 'not there')}"
        for name in sorted(set(kept) | set(own), key=lambda name: (not name.startswith("weights."), name))
        if kept.get(name) != own.get(name)
    ]
    if names != (mine := [type(optimizer).__name__ for optimizer in optimizers]):
        problems = [f"its optimizers are {', '.join(names)}, and these are {', '.join(mine)}"]
    if problems:
        told = f"the checkpoint {directory} is of another model, or a file of it is missing"
        raise BadInput([f"{told}: {problem}" for problem in problems[:5]])


def _rng() -> dict[str, torch.Tensor]:
    cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def _set_rng(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
