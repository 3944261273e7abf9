"""Training state on disk, without pickle: tensors as safetensors, the rest as JSON.

Decision: a checkpoint is a directory that is written under a temporary name and renamed when it is complete, so one
that was being written when its process died is never taken. What a reader finds under a checkpoint's name is whole.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

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
    directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LambdaLR, version: int
) -> None:
    """Weights, optimizer moments, schedule position, torch's RNG and the weight version."""
    save_file(
        {name: value.detach().contiguous() for name, value in model.named_parameters()},
        directory / "weights.safetensors",
    )
    state = optimizer.state_dict()
    moments = {
        f"{index}.{name}": value
        for index, entries in state["state"].items()
        for name, value in entries.items()
        if isinstance(value, torch.Tensor)
    }
    save_file(moments, directory / "optimizer.safetensors")
    save_file(_rng(), directory / "rng.safetensors")
    scheduler_state = {name: value for name, value in scheduler.state_dict().items() if name != "lr_lambdas"}
    details = {"groups": state["param_groups"], "scheduler": scheduler_state, "weight_version": version}
    (directory / "training.json").write_text(json.dumps(details))


def load_training_state(
    directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LambdaLR
) -> int:
    """Take up what `save_training_state` wrote; returns the weight version."""
    weights = load_file(directory / "weights.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    details: dict[str, Any] = json.loads((directory / "training.json").read_text())
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in load_file(directory / "optimizer.safetensors").items():
        index, entry = name.split(".", 1)
        moments.setdefault(int(index), {})[entry] = value
    optimizer.load_state_dict({"state": moments, "param_groups": details["groups"]})
    scheduler.load_state_dict({**details["scheduler"], "lr_lambdas": [None]})
    _set_rng(load_file(directory / "rng.safetensors"))
    version: int = details["weight_version"]
    return version


def _rng() -> dict[str, torch.Tensor]:
    cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def _set_rng(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
