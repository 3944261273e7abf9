"""The types that authors of environments need; all are from `rollouts_core.types.episode`."""

from rollouts_core.types.episode import AgentState, Replied, Trajectory

__all__ = ["AgentState", "Replied", "Trajectory"]
