"""Rows of well-known data sets as ours: messages, an answer, and what else they tell, which slices results.

gsm8k   question, answer ("... #### 42")                     arXiv 2110.14168
math    problem, solution ("... \\boxed{42}"), level, type    arXiv 2103.03874; `answer` and `subject` as in MATH-500
"""

from collections.abc import Callable, Mapping
from typing import Any

Value = Mapping[str, Any]


class NotLaidOutSo(ValueError):
    """A row is not of the layout; the message says why."""


def laid_out(layout: str, value: Value) -> Value:
    """A row as ours. Raises `NotLaidOutSo`."""
    return LAYOUTS[layout](value)


def _gsm8k(value: Value) -> Value:
    solution, mark, answer = _text(value, "answer").rpartition("####")
    if not mark or not answer.strip():
        raise NotLaidOutSo("its 'answer' has no '####' with the number behind it")
    question = _text(value, "question")
    return {"messages": _asked(question), "question": question, "answer": answer.strip().replace(",", ""),
            "solution": solution.strip()}  # fmt: skip


def _math(value: Value) -> Value:
    problem, solution = _text(value, "problem"), _text(value, "solution")
    answer = value.get("answer") or boxed(solution)
    if not answer:
        raise NotLaidOutSo("its 'solution' has no \\boxed{...}, and there is no 'answer'")
    subject = value.get("type") or value.get("subject") or ""
    return {"messages": _asked(problem), "question": problem, "answer": str(answer), "solution": solution,
            "subject": str(subject), "level": str(value.get("level", ""))}  # fmt: skip


LAYOUTS: dict[str, Callable[[Value], Value]] = {"rows": lambda value: value, "gsm8k": _gsm8k, "math": _math}


def boxed(text: str) -> str:
    """What the last \\boxed{...} holds; empty without one."""
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


def _asked(question: str) -> list[Value]:
    return [{"role": "user", "content": question.strip()}]
