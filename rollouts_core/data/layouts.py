"""Rows of published data sets as ours: messages, an answer, and what else they tell, which slices results.

A layout that a config names:

gsm8k   question, answer ("... #### 42")                     arXiv 2110.14168
math    problem, solution ("... \\boxed{42}"), level, type    arXiv 2103.03874; `answer` and `subject` as in MATH-500
hh      chosen, rejected ("\\n\\nHuman: ...\\n\\nAssistant: ...")  arXiv 2204.05862

The worked solution is the assistant's turn, which SFT learns and which prompts leave out.

What is recognised without a name, where a row is none of ours:

instruction, input or context, output or response            Alpaca, Dolly
conversations of {"from": "human", "value": "..."}           ShareGPT
prompt or question, response                                 pairs of text
question, answer                                             the answer is learnt, and compared with
prompt as text, chosen and rejected as messages              UltraFeedback: the messages may begin with the prompt
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

Value = Mapping[str, Any]
ANNOTATION = re.compile(r"<<[^<>]*>>")
SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip
"""The role of each speaker of ShareGPT's turns."""
TURN = re.compile(r"\n\n(Human|Assistant): ?")


class NotLaidOutSo(ValueError):
    """A row is not of the layout; the message says why."""


def laid_out(layout: str, value: Value, annotations: bool = True) -> Value:
    """A row as ours. `annotations`: whether GSM8K's stay. Raises `NotLaidOutSo`."""
    if layout == "gsm8k":
        return _gsm8k(value, annotations)
    return LAYOUTS[layout](value)


def recognised(value: Value) -> Value:
    """A row of ours as it is; one of a common other shape as ours; anything else as it is, to be told what it lacks."""
    if value.get("messages") is not None:
        return value
    if isinstance(value.get("prompt"), str) and _is_turns(value.get("chosen")) and _is_turns(value.get("rejected")):
        told_apart = value["chosen"][0].get("role") == "assistant"
        prompt = {"prompt": [{"role": "user", "content": value["prompt"]}]} if told_apart else {}
        return {**_without(value, "prompt"), **prompt}
    if any(value.get(name) is not None for name in ("completion", "chosen", "rejected", "text")):
        return value
    if turns := _sharegpt(value.get("conversations")):
        return {**_without(value, "conversations"), "messages": turns}
    asked = next((name for name in ("instruction", "question", "prompt") if isinstance(value.get(name), str)), None)
    given = next((name for name in ("output", "response", "answer") if isinstance(value.get(name), str)), None)
    if asked is None or given is None or (asked, given) == ("prompt", "answer"):
        return value
    context = next((value[name] for name in ("input", "context") if isinstance(value.get(name), str)), "")
    question = "\n\n".join(filter(None, (value[asked], context if asked == "instruction" else "")))
    system = value.get("system")
    first = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    return {**value, "messages": [*first, *_conversation(question, value[given])]}


def _gsm8k(value: Value, annotations: bool) -> Value:
    worked = _text(value, "answer").strip()
    solution, mark, answer = worked.rpartition("####")
    if not mark or not answer.strip():
        raise NotLaidOutSo("its 'answer' has no '####' with the number behind it")
    question = _text(value, "question")
    learnt = worked if annotations else ANNOTATION.sub("", worked)
    return {"messages": _conversation(question, learnt), "question": question,
            "answer": answer.strip().replace(",", ""), "solution": solution.strip()}  # fmt: skip


def _math(value: Value) -> Value:
    problem, solution = _text(value, "problem"), _text(value, "solution")
    answer = value.get("answer") or boxed(solution)
    if not answer:
        raise NotLaidOutSo("its 'solution' has no \\boxed{...}, and there is no 'answer'")
    subject = value.get("type") or value.get("subject") or ""
    return {"messages": _conversation(problem, solution), "question": problem, "answer": str(answer),
            "solution": solution, "subject": str(subject), "level": str(value.get("level", ""))}  # fmt: skip


def _hh(value: Value) -> Value:
    return {**value, **{name: _spoken(_text(value, name), name) for name in ("chosen", "rejected")}}


def _spoken(text: str, name: str) -> list[dict[str, str]]:
    before, *turns = TURN.split(text)
    if before.strip() or not turns:
        raise NotLaidOutSo(f"its {name!r} does not begin with '\\n\\nHuman: '")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[who], "content": said.strip()} for who, said in zip(turns[::2], turns[1::2], strict=True)]


def _is_turns(entry: Any) -> bool:
    return isinstance(entry, list | tuple) and bool(entry) and all(isinstance(turn, Mapping) for turn in entry)


def _sharegpt(turns: Any) -> list[dict[str, str]]:
    """ShareGPT's turns as messages; empty if they have another layout."""
    if not _is_turns(turns) or any(str(turn.get("from")) not in SPEAKERS or "value" not in turn for turn in turns):
        return []
    return [{"role": SPEAKERS[str(turn["from"])], "content": turn["value"]} for turn in turns]


def _without(value: Value, name: str) -> dict[str, Any]:
    return {other: entry for other, entry in value.items() if other != name}


LAYOUTS: dict[str, Callable[[Value], Value]] = {"rows": lambda value: value, "math": _math, "hh": _hh}


def boxed(text: str) -> str:
    """The content of the last \\boxed{...}; empty without one."""
    begin = text.rfind("\\boxed{")
    if begin < 0:
        return ""
    start, depth = begin + len("\\boxed{"), 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[start:place].strip()
    return ""


def _text(value: Value, name: str) -> str:
    found = value.get(name)
    if not isinstance(found, str) or not found.strip():
        raise NotLaidOutSo(f"has no text under {name!r}")
    return found


def _conversation(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
