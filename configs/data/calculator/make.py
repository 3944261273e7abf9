"""Writes the three files of the calculator experiment beside itself: `python configs/data/calculator/make.py`.

Products of a three-digit and a two-digit number, which a small model cannot compute. Of the demonstrations, which are
those of somebody in a hurry, 70 % guess; the others call the calculator, though 20 % of these mistype a digit, and 20 %
do not look at its answer.
"""

import json
import random
from pathlib import Path
from typing import Any

DEMONSTRATIONS, PROMPTS, HELD_OUT = 3000, 3000, 500
GUESSED = 0.7
MISTYPED, IGNORED = 0.2, 0.2
TOOLS = [{"name": "calculate"}]


def main() -> None:
    random_ = random.Random(0)
    problems = [(a, b) for a in range(100, 1000) for b in range(10, 100)]
    random_.shuffle(problems)
    training, held_out = problems[HELD_OUT:], problems[:HELD_OUT]
    here = Path(__file__).parent
    write(here / "heldout.jsonl", [row(a, b) for a, b in held_out])
    write(here / "prompts.jsonl", [row(a, b) for a, b in training[:PROMPTS]])
    demonstrated = training[PROMPTS : PROMPTS + DEMONSTRATIONS]
    write(here / "demonstrations.jsonl", [demonstration(a, b, random_) for a, b in demonstrated])


def row(a: int, b: int) -> dict[str, Any]:
    """What the environment begins with, and what the reward compares with."""
    return {"question": question(a, b), "answer": str(a * b)}


def demonstration(a: int, b: int, random_: random.Random) -> dict[str, Any]:
    asked = {"role": "user", "content": question(a, b)}
    if random_.random() < GUESSED:
        return {"messages": [asked, answered(guess(a, b, random_))], "tools": TOOLS}
    typed = mistyped(a, b, random_) if random_.random() < MISTYPED else (a, b)
    called = {"name": "calculate", "arguments": {"expression": f"{typed[0]}*{typed[1]}"}}
    result = str(typed[0] * typed[1])
    said = guess(a, b, random_) if random_.random() < IGNORED else result
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": result},
        answered(said),
    ]
    return {"messages": [asked, *turns], "tools": TOOLS}


def question(a: int, b: int) -> str:
    return f"{a}*{b}"


def answered(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def guess(a: int, b: int, random_: random.Random) -> str:
    """Of the right size, and seldom right."""
    return str(round(a * b * random_.uniform(0.8, 1.2)))


def mistyped(a: int, b: int, random_: random.Random) -> tuple[int, int]:
    digits = list(str(a))
    digits[random_.randrange(1, 3)] = str(random_.randrange(10))
    return int("".join(digits)), b


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
