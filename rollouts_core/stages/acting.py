"""The environment that a stage's policy acts in."""

from typing import Any

from rollouts_core.config import EnvironmentConfig
from rollouts_core.data.turns import turn_format
from rollouts_core.environments.registry import check_environment, load_environment
from rollouts_core.rollout.episodes import Acting
from rollouts_core.stages.stage import Stage


def acting_of(stage: Stage, settings: EnvironmentConfig | None, tokenizer: Any, max_length: int) -> Acting | None:
    """None where the config has no environment. Raises `BadInput` where it cannot run here, or the model's chat
    template cannot speak of its tools."""
    if settings is None:
        return None
    environment = load_environment(stage.external["environment"].location)
    check_environment(environment)
    form = turn_format(tokenizer, [tool.schema for tool in environment.get_tools()])
    return Acting(environment, form, max_length, settings.max_turns, settings.tool_seconds)
