"""Kept for configs that import algorithms from here; `rollouts_core.config` has them all."""

from rollouts_core.config import (
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    PPO,
    RLOO,
    CustomAlgorithm,
    Distillation,
    DrGRPO,
    MaxRL,
    ReinforcePlusPlus,
)

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
