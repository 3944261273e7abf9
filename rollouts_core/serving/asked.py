"""Requests of OpenAI's protocol, read and checked.

Decision: an option that would change an answer and is not supported is refused, not ignored: a client that sets a
penalty would never know that it has no effect. Options that change nothing (`user`, `metadata`, ...) are ignored, as
OpenAI's servers do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollouts_core.data.messages import message_from_data, messages_problem, tools_from_data, tools_problem
from rollouts_core.errors import BadInput
from rollouts_core.inference.engine import Truncation
from rollouts_core.serving.talker import Manner
from rollouts_core.types import Data, Message

NOT_DONE: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},),
    "logprobs": (False,), "top_logprobs": (0,), "best_of": (1,), "echo": (False,), "suffix": ("",),
    "parallel_tool_calls": (True,), "response_format": ({"type": "text"},), "tool_choice": ("auto", "none"),
}  # fmt: skip
"""Fields that would change an answer, and the values with which they don't."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")
    model: str = ""
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, lt=1)
    stop: str | list[str] | None = None
    seed: int | None = Field(default=None, gt=-(2**63), lt=2**63)
    n: int = Field(default=1, ge=1, le=128)
    stream: bool = False
    stream_options: dict[str, Any] | None = None


@dataclass(frozen=True)
class Asked:
    model: str
    manners: tuple[Manner, ...]
    """How to sample each answer."""
    max_tokens: int | None
    stream: bool
    usage: bool
    """Whether a stream ends with what it took."""
    messages: tuple[Message, ...] = ()
    tools: tuple[Data, ...] = ()
    prompts: tuple[str | tuple[int, ...], ...] = ()
    """For completions: texts or token ids."""


def read_chat(body: Any, seed: int) -> Asked:
    """`seed`: where the client names none. Raises `BadInput` with every problem."""
    asked, problems = _read(body, seed)
    given: Mapping[str, Any] = body if isinstance(body, Mapping) else {}
    messages: Any = given.get("messages")
    tools = None if given.get("tool_choice") == "none" else given.get("tools")
    problems += [found for found in (messages_problem(messages), tools_problem(tools)) if found]
    if asked is None or problems:
        raise BadInput(problems)
    return Asked(**asked, messages=tuple(map(message_from_data, messages)), tools=tools_from_data(tools))


def read_completion(body: Any, seed: int) -> Asked:
    """The same as `read_chat`, for completions."""
    asked, problems = _read(body, seed)
    prompts = _prompts(body.get("prompt")) if isinstance(body, Mapping) else ()
    problems += [] if prompts else ["prompt: a text, token ids, or a list of these, none of them empty"]
    if asked is None or problems:
        raise BadInput(problems)
    return Asked(**asked, prompts=prompts)


def _read(body: Any, seed: int) -> tuple[dict[str, Any] | None, list[str]]:
    if not isinstance(body, Mapping):
        return None, ["the body is not a JSON object"]
    problems = [
        f"{name}: not supported here"
        for name, harmless in NOT_DONE.items()
        if body.get(name) is not None and body[name] not in harmless
    ]
    try:
        read = _Body.model_validate(body)
    except ValidationError as error:
        details = error.errors(include_url=False)
        return None, problems + [f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in details]
    stop = (read.stop,) if isinstance(read.stop, str) else tuple(read.stop or ())
    if "" in stop:
        problems.append("stop: an empty text would end every answer at once")
    truncation = Truncation(read.top_p or 1.0, max(read.top_k or 0, 0), read.min_p or 0.0)
    first = seed if read.seed is None else abs(read.seed)
    temperature = 1.0 if read.temperature is None else read.temperature
    manners = tuple(Manner(temperature, truncation, stop, first + number) for number in range(read.n))
    return {
        "model": read.model,
        "manners": manners,
        "max_tokens": read.max_completion_tokens or read.max_tokens,
        "stream": read.stream,
        "usage": bool((read.stream_options or {}).get("include_usage")),
    }, problems


def _prompts(prompt: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str) and prompt:
        return (prompt,)
    if not isinstance(prompt, Sequence) or not prompt:
        return ()
    if all(isinstance(entry, int) for entry in prompt):
        return (tuple(prompt),)
    found = [_prompts(entry) for entry in prompt]
    return tuple(one for entry in found for one in entry) if all(len(entry) == 1 for entry in found) else ()
