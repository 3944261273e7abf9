"""Kept for scripts that import these from here; they are in `rollouts_core.config.loading`."""

from rollouts_core.config.loading import from_data, load_config, save_config, to_data

__all__ = ["from_data", "load_config", "save_config", "to_data"]
