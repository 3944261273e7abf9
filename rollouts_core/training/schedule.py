"""Learning-rate schedules: linear warm-up, then cosine, linear or no decay, to zero."""

import math
from typing import Literal

import torch
from torch.optim.lr_scheduler import LambdaLR

Schedule = Literal["cosine", "linear", "constant"]


def create_scheduler(optimizer: torch.optim.Optimizer, kind: Schedule, warmup_steps: int, num_steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: rate(kind, step, warmup_steps, num_steps))


def create_warmup_cosine_scheduler(optimizer: torch.optim.Optimizer, warmup_steps: int, num_steps: int) -> LambdaLR:
    return create_scheduler(optimizer, "cosine", warmup_steps, num_steps)


def rate(kind: Schedule, step: int, warmup_steps: int, num_steps: int) -> float:
    """The factor on the peak learning rate at optimizer step `step`, counted from 0; the first step is not lost."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if kind == "constant":
        return 1.0
    left = max(0.0, 1 - (step - warmup_steps) / max(1, num_steps - warmup_steps))
    return left if kind == "linear" else 0.5 * (1 - math.cos(math.pi * left))
