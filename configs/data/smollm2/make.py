"""Writes the three files of the SmolLM2 experiment beside itself: `python configs/data/smollm2/make.py`.

Sums of two numbers from 1 to 49, asked as a person would. Of the 2,401, 400 are held out, and 96 of the others are
demonstrated: enough to show the form of an answer, and not enough to teach addition.
"""

import json
import random
from pathlib import Path

HELD_OUT = 400
DEMONSTRATED = 96
NUMBERS = range(1, 50)


def main() -> None:
    sums = [(a, b) for a in NUMBERS for b in NUMBERS]
    random.Random(0).shuffle(sums)
    here = Path(__file__).parent
    held_out, training = sums[:HELD_OUT], sums[HELD_OUT:]
    write(here / "heldout.jsonl", [prompt(a, b) for a, b in held_out])
    write(here / "prompts.jsonl", [prompt(a, b) for a, b in training])
    write(here / "demonstrations.jsonl", [demonstration(a, b) for a, b in training[:DEMONSTRATED]])


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prompt(a: int, b: int) -> dict[str, object]:
    return {"messages": [question(a, b)], "answer": str(a + b)}


def demonstration(a: int, b: int) -> dict[str, object]:
    return {"messages": [question(a, b), {"role": "assistant", "content": str(a + b)}]}


def question(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {a} + {b}? Reply with the number only."}


if __name__ == "__main__":
    main()
