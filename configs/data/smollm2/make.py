"""Writes the two files of the SmolLM2 experiment beside itself: `python configs/data/smollm2/make.py`.

Sums of two numbers from 1 to 49, asked as a person would. Of the 2,401, 400 are held out. RL needs no demonstrations.
"""

import json
import random
from pathlib import Path

HELD_OUT = 400
NUMBERS = range(1, 50)


def main() -> None:
    sums = [(a, b) for a in NUMBERS for b in NUMBERS]
    random.Random(0).shuffle(sums)
    here = Path(__file__).parent
    write(here / "heldout.jsonl", sums[:HELD_OUT])
    write(here / "prompts.jsonl", sums[HELD_OUT:])


def write(path: Path, sums: list[tuple[int, int]]) -> None:
    path.write_text("".join(json.dumps(prompt(a, b)) + "\n" for a, b in sums))


def prompt(a: int, b: int) -> dict[str, object]:
    question = f"What is {a} + {b}? Reply with the number only."
    return {"messages": [{"role": "user", "content": question}], "answer": str(a + b)}


if __name__ == "__main__":
    main()
