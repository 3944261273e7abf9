"""Kept for configs that import algorithms from here; `rollouts_core.config` has them all."""

from rollouts_core.config.algorithms import *  # noqa: F403
