"""The values that pass between data, rollout, reward and training.

    Message         one turn of a conversation, with the tools it calls
    ToolResult      what a call came to
    Prompt          a tokenized prompt with what its reward needs
    Sample          one answer to one prompt, of one turn or several: tokens, mask, log-probabilities, weight versions,
                    reward
    AgentState      an episode as far as it has come; Trajectory: all of it (both in `episode`)

All are frozen; a change makes a new value (`dataclasses.replace`).
"""

from rollouts_core.types.messages import Data, Message, ToolCall, ToolResult
from rollouts_core.types.samples import Prompt, Sample, Status

__all__ = ["Data", "Message", "Prompt", "Sample", "Status", "ToolCall", "ToolResult"]
