"""The environment that a stage's policy acts in."""

from typing import Any

from rollouts_core.config import EnvironmentConfig
from rollouts_core.data.turns import turn_format
from rollouts_core.environments.registry import check_environment, load_environment
from rollouts_core.rollout.episodes import Acting
from rollouts_core.stages.stage import Stage


def acting_of(stage: Stage, settings: EnvironmentConfig | None, tokenizer: Any, max_length: int) -> Acting | None:
    """The environment of episodes; None if the config has none. Raises `BadInput` if it can't run here, or the chat
    template can't render its tools."""
    if settings is None:
        return None
    environment = load_environment(stage.external["environment"].location)
    check_environment(environment)
    form = turn_format(tokenizer, [tool.schema for tool in environment.get_tools()])
    return Acting(environment, form, max_length, settings.max_turns, settings.tool_seconds)
