"""Questions that are answered by running Python: the tool `run_python`, in the sandbox."""

from functools import partial

import anyio

from rollouts_core.environments.environment import Functions
from rollouts_core.environments.sandbox import SandboxLimits, check_sandbox, run_python
from rollouts_core.environments.shipped.questions import questions
from rollouts_core.environments.tools import Tool, tool

LIMITS = SandboxLimits()


def python_code(question: str = "question", system: str = "", limits: SandboxLimits = LIMITS) -> Functions:
    asked = questions(question, system)
    return Functions(asked.messages, (python_tool(limits),), check=partial(anyio.run, check_sandbox))


def python_tool(limits: SandboxLimits) -> Tool:
    async def run_python_code(code: str) -> str:
        """Runs a Python program and gives what it prints. It has no network, no files, and a few seconds."""
        ran = await run_python(code, limits)
        ended = f"\n(ended after {limits.seconds} s)" if ran.timed_out else ""
        return (ran.output + ended) or "(it printed nothing)"

    return tool(run_python_code)
