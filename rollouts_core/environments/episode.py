"""What those who write an environment need of an episode; all of it is in `rollouts_core.types.episode`."""

from rollouts_core.types.episode import AgentState, Replied, Trajectory

__all__ = ["AgentState", "Replied", "Trajectory"]
