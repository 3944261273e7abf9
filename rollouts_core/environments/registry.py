"""Environments named in the config: shipped ones, or a user's own by import path."""

from collections.abc import Callable
from typing import Any

from rollouts_core.environments.environment import Environment
from rollouts_core.environments.shipped.calculator import calculator
from rollouts_core.environments.shipped.guess_number import guess_number
from rollouts_core.environments.shipped.python_code import python_code
from rollouts_core.environments.shipped.questions import questions
from rollouts_core.errors import BadInput
from rollouts_core.store.identity import External
from rollouts_core.user_code import identify_function, load_function

WHAT = "environment"
METHODS = ("begin", "get_tools", "exec_tool", "on_assistant_message")
SHIPPED: dict[str, Callable[[], Environment]] = {
    "questions": questions,
    "calculator": calculator,
    "guess_number": guess_number,
    "python_code": python_code,
}


def identify_environment(name: str) -> External:
    """The identity and location of an environment. Raises `BadInput` when there is no such file or module."""
    return identify_function(name, SHIPPED, WHAT)


def check_environment(environment: Environment) -> None:
    """Raises `BadInput` where this machine lacks what the environment needs."""
    check = getattr(environment, "check", None)
    if check is not None:
        check()


def load_environment(location: str) -> Environment:
    """Make it. Raises `BadInput` when its module fails to import, it fails to be made, or lacks a method."""
    make: Callable[[], Any] = load_function(location, SHIPPED, WHAT)
    environment = _of_its_own(location, make)
    if lacking := [name for name in METHODS if not callable(getattr(environment, name, None))]:
        raise BadInput(f"environment {location}: it lacks {', '.join(lacking)}")
    if any(not hasattr(tool, "schema") for tool in _of_its_own(location, environment.get_tools)):
        raise BadInput(
            f"environment {location}: get_tools returns something that is not a tool; make tools with `tool(function)`"
        )
    made: Environment = environment
    return made


def _of_its_own(location: str, code: Callable[[], Any]) -> Any:
    try:
        return code()
    except Exception as error:
        raise BadInput(
            f"environment {location}: its function or class is called without arguments, and raised "
            f"{type(error).__name__}: {error}"
        ) from error
