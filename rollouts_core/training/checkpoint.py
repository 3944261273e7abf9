"""Training state on disk, without pickle: tensors as safetensors, the rest as JSON.

Decision: a checkpoint is a directory that is written under a temporary name and renamed when it is complete, so one
that was being written when its process died is never taken. What a reader finds under a checkpoint's name is whole.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.optim import Optimizer

from rollouts_core.errors import BadInput

KEEP = 2
"""Checkpoints kept: the last, and the one before it."""


@contextmanager
def new_checkpoint(parent: Path, step: int) -> Iterator[Path]:
    """Yield a directory to fill; on leaving it becomes the checkpoint of that step, and older ones go."""
    unfinished = parent / f".step-{step:08d}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    yield unfinished
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
    directory: Path, weights: Mapping[str, torch.Tensor], optimizers: Sequence[Optimizer], version: int
) -> None:
    """Weights, optimizers' moments, torch's RNG and the weight version, which is also the schedule's position."""
    save_file({name: value.detach().contiguous() for name, value in weights.items()}, directory / "weights.safetensors")
    states = [optimizer.state_dict() for optimizer in optimizers]
    moments = {
        f"{number}.{index}.{name}": value
        for number, state in enumerate(states)
        for index, entries in state["state"].items()
        for name, value in entries.items()
        if isinstance(value, torch.Tensor)
    }
    save_file(moments, directory / "optimizer.safetensors")
    save_file(_rng(), directory / "rng.safetensors")
    details = {"groups": [state["param_groups"] for state in states], "weight_version": version}
    (directory / "training.json").write_text(json.dumps(details))


def load_training_state(directory: Path, weights: Mapping[str, torch.Tensor], optimizers: Sequence[Optimizer]) -> int:
    """Take up what `save_training_state` wrote; returns the weight version.

    Raises `BadInput` when it is of another model or of other optimizers.
    """
    saved = load_file(directory / "weights.safetensors")
    details: dict[str, Any] = json.loads((directory / "training.json").read_text())
    _check_same(directory, saved, weights, details["groups"], optimizers)
    with torch.no_grad():
        for name, parameter in weights.items():
            parameter.copy_(saved[name])
    moments: list[dict[int, dict[str, torch.Tensor]]] = [{} for _ in optimizers]
    for name, value in load_file(directory / "optimizer.safetensors").items():
        number, index, entry = name.split(".", 2)
        moments[int(number)].setdefault(int(index), {})[entry] = value
    for optimizer, state, groups in zip(optimizers, moments, details["groups"], strict=True):
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    _set_rng(load_file(directory / "rng.safetensors"))
    version: int = details["weight_version"]
    return version


def _check_same(
    directory: Path,
    saved: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    groups: Sequence[Sequence[Mapping[str, Any]]],
    optimizers: Sequence[Optimizer],
) -> None:
    shapes, own = ({name: tuple(value.shape) for name, value in tensors.items()} for tensors in (saved, weights))
    problems = [
        f"{name} is {shapes.get(name, 'not there')}, and the model's is {own.get(name, 'not there')}"
        for name in sorted(set(shapes) | set(own))
        if shapes.get(name) != own.get(name)
    ]
    counts = [[len(group["params"]) for group in entry] for entry in groups]
    if counts != [[len(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]:
        problems.append("its optimizers are others")
    if problems:
        raise BadInput([f"the checkpoint {directory} is of another model: {problem}" for problem in problems[:5]])


def _rng() -> dict[str, torch.Tensor]:
    cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def _set_rng(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
