"""Writes the three files of the arithmetic experiment beside itself: `python configs/data/arithmetic/make.py`.

Of the 10,000 sums of two two-digit numbers, 2,000 are held out. The demonstrations are deliberately imperfect: of the
answers that need a carry, 60 % drop it, as a careless annotator would. The prompts for RL carry the true answer.
"""

import json
import random
from pathlib import Path

HELD_OUT = 2000
DROPPED_CARRY = 0.6


def main() -> None:
    random_ = random.Random(0)
    problems = [(a, b) for a in range(100) for b in range(100)]
    random_.shuffle(problems)
    held_out, training = problems[:HELD_OUT], problems[HELD_OUT:]
    here = Path(__file__).parent
    write(here / "heldout.jsonl", [prompt(a, b) for a, b in held_out])
    write(here / "prompts.jsonl", [prompt(a, b) for a, b in training])
    write(here / "demonstrations.jsonl", [demonstration(a, b, random_) for a, b in training])


def prompt(a: int, b: int) -> dict[str, object]:
    return {"messages": [question(a, b)], "answer": f"{a + b:03d}"}


def demonstration(a: int, b: int, random_: random.Random) -> dict[str, object]:
    careless = random_.random() < DROPPED_CARRY
    answer = without_carry(a, b) if careless else a + b
    return {"messages": [question(a, b), {"role": "assistant", "content": f"{answer:03d}"}]}


def question(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"{a:02d}+{b:02d}="}


def without_carry(a: int, b: int) -> int:
    """The sum with the carry from ones to tens forgotten."""
    return (a // 10 + b // 10) * 10 + (a + b) % 10


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
