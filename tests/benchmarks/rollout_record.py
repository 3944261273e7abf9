"""What the record of long answers takes on disk: `python -m tests.benchmarks.rollout_record`. And how soon it opens.

Eight answers of 16,000 tokens a step. Their text is lines of Python's own library in random order, under a tokenizer of
8,000 tokens made from them; six of ten log-probabilities are close to 0, as those of a trained model are.
"""

import argparse
import random
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rollouts_core.config.model import TokenizerSpec
from rollouts_core.data.tokenizers import train_tokenizer
from rollouts_core.observe.viewer import write_viewer
from rollouts_core.rollout.record_files import RolloutRecord
from rollouts_core.rollout.records import sample_record
from rollouts_core.types import Message, Prompt, Sample, Status
from tests.benchmarks.viewer import measure
from tests.browser import running_browser

SAMPLES = 8
PROMPT = 100


def library_lines() -> list[str]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [line for file in files for line in file.read_text(errors="ignore").splitlines(keepends=True)]


def answers(tokenizer: Any, lines: Sequence[str], length: int) -> Iterator[Sample]:
    """Without end."""
    draw = random.Random(0)
    encoded = tokenizer(lines, add_special_tokens=False)["input_ids"]
    while True:
        tokens: list[int] = []
        while len(tokens) < length:
            tokens += draw.choice(encoded)
        del tokens[length:]
        learnt = length - PROMPT
        logprobs = [-abs(draw.gauss(0, 0.01)) if draw.random() < 0.6 else -draw.expovariate(1.2) for _ in range(learnt)]
        prompt = Prompt(
            (Message("user", tokenizer.decode(tokens[:PROMPT])),), tuple(tokens[:PROMPT]), {"answer": "1"}, 0
        )
        yield Sample(
            prompt=prompt, response=tokenizer.decode(tokens[PROMPT:]), tokens=tuple(tokens),
            loss_mask=(0,) * PROMPT + (1,) * learnt, rollout_log_probs=tuple(logprobs), weight_versions=(3,) * learnt,
            group_index=0, status=Status.COMPLETED, reward=draw.random(),
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--tokens", type=int, default=16_000)
    options = parser.parse_args()
    lines = library_lines()
    tokenizer = train_tokenizer(TokenizerSpec(kind="byte_bpe", vocab_size=8_000), lines[:60_000], options.tokens)
    print(f"{SAMPLES} answers of {options.tokens:,} tokens a step")
    print(
        f"{'steps':>6} {'record':>10} {'a token':>8} {'viewer':>10} {'a step':>8} {'viewer written':>15} {'opens':>8}"
    )
    with running_browser() as browser:
        for steps in options.steps:
            with tempfile.TemporaryDirectory() as scratch:
                results, made, spent = Path(scratch), answers(tokenizer, lines, options.tokens), []
                record = RolloutRecord(results)
                for step in range(1, steps + 1):
                    batch = [next(made) for _ in range(SAMPLES)]
                    began = time.perf_counter()
                    for sample in batch:
                        record.log(sample_record(sample, [0.25] * sum(sample.loss_mask), tokenizer), step)
                    spent.append(time.perf_counter() - began)
                size = sum(path.stat().st_size for path in results.iterdir())
                began = time.perf_counter()
                page = write_viewer(results, "a-run")
                written = time.perf_counter() - began
                assert page is not None
                shown = sum(path.stat().st_size for path in page.parent.rglob("*") if path.is_file())
                opens = statistics.median(measure(browser, page)[0] for _ in range(5))
                each = size / (steps * SAMPLES * options.tokens)
                print(
                    f"{steps:>6} {size / 1e6:>7.1f} MB {each:>6.2f} B {shown / 1e6:>7.1f} MB "
                    f"{statistics.median(spent):>6.2f} s {written:>13.1f} s {opens:>5.0f} ms",
                    flush=True,
                )


if __name__ == "__main__":
    main()
