"""Tokenization beside `datasets.map`, in one run: `python -m tests.benchmarks.tokenization`.

The same ragged conversations from JSONL, through the same ChatML template and byte-level BPE tokenizer, to Parquet with
ids and loss mask; in two processes on both sides, whose start is not counted, and ours in one as well. The ceiling is
what cannot be left out: each conversation rendered once and encoded, spread over all cores, nothing masked or written.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np

ROWS = 40_000
PROCESSES = 2
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}"
    "{{ message['content'] + '<|im_end|>' + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The same text; `datasets.map` gets its mask from the marks."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        prepare(directory)
        times: dict[str, list[float]] = {}
        for _ in range(options.rounds):
            for side, measure in SIDES.items():
                times.setdefault(side, []).append(measure(directory))
    tell({side: ROWS / statistics.median(seconds) for side, seconds in times.items()})
    return 0


def prepare(directory: Path) -> None:
    """Rows and tokenizer."""
    from rollouts_core.config.model import TokenizerSpec
    from rollouts_core.data.tokenizers import save_tokenizer, train_tokenizer

    random = np.random.default_rng(0)
    words = ["".join(map(chr, random.integers(97, 123, random.integers(2, 9)))) for _ in range(3000)]

    def text(mean: float) -> str:
        return " ".join(words[place] for place in random.zipf(1.3, max(1, int(random.gamma(2, mean / 2)))) % len(words))

    with (directory / "rows.jsonl").open("w") as file:
        for _ in range(ROWS):
            turns = [
                {"role": role, "content": text(mean)}
                for _ in range(random.integers(1, 3))
                for role, mean in (("user", 12.0), ("assistant", 25.0))
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    sample = (directory / "rows.jsonl").read_text().splitlines()[:2000]
    texts = [turn["content"] for line in sample for turn in json.loads(line)["messages"]]
    tokenizer = train_tokenizer(TokenizerSpec(kind="byte_bpe", vocab_size=4000), texts, 4096)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "eos_token": "<|im_end|>"}
    )
    tokenizer.chat_template = CHATML
    save_tokenizer(tokenizer, directory / "tokenizer")


def ours(directory: Path, processes: int) -> float:
    """The library's own path, from the file to shards of Parquet."""
    return _together(_our_part, directory, processes)


def _our_part(directory: Path, part: int, parts: int, ready: Barrier) -> None:
    from rollouts_core.config import Jsonl
    from rollouts_core.data.sources import row_shards
    from rollouts_core.data.tokenized import write_table
    from rollouts_core.data.tokenizers import load_tokenizer
    from rollouts_core.data.tokenizing import collecting_seldom, tokenize_examples
    from rollouts_core.stages.tokenize import SHARD_ROWS
    from rollouts_core.store.identity import identify_source

    source = Jsonl(path=directory / "rows.jsonl")
    external = identify_source(source)
    tokenizer = load_tokenizer(str(directory / "tokenizer"))
    ready.wait()
    with collecting_seldom() as collect:
        for shard in row_shards(source, external, SHARD_ROWS, lambda number: number % parts == part):
            if shard.rows:
                table = tokenize_examples(shard.rows, tokenizer, 4096)
                write_table(table, directory / "ours" / f"{shard.number:05d}.parquet")
                collect()
    ready.wait()


def mapped(directory: Path) -> float:
    """`datasets.map` in two processes, the template's marks as mask, to Parquet."""
    import datasets

    from rollouts_core.data.tokenizers import load_tokenizer

    datasets.disable_progress_bars()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load_tokenizer(str(directory / "tokenizer"))
    tokenizer.chat_template = MARKED
    began = time.perf_counter()
    cache = directory / f"cache-{began}"
    loaded = datasets.load_dataset(
        "json", data_files=str(directory / "rows.jsonl"), split="train", cache_dir=str(cache)
    )
    done = loaded.map(
        lambda row: tokenizer.apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        ),
        num_proc=PROCESSES,
        remove_columns=loaded.column_names,
    )
    done.to_parquet(str(directory / "mapped.parquet"))
    seconds = time.perf_counter() - began
    del os.environ["TOKENIZERS_PARALLELISM"]
    return seconds


def ceiling(directory: Path) -> float:
    return _together(_rendered_and_encoded, directory, os.cpu_count() or 1)


def _rendered_and_encoded(directory: Path, part: int, parts: int, ready: Barrier) -> None:
    from rollouts_core.data.tokenizers import load_tokenizer

    lines = (directory / "rows.jsonl").read_text().splitlines()[part::parts]
    conversations = [json.loads(line)["messages"] for line in lines]
    tokenizer = load_tokenizer(str(directory / "tokenizer"))
    ready.wait()
    for start in range(0, len(conversations), 2000):
        texts = tokenizer.apply_chat_template(conversations[start : start + 2000], tokenize=False)
        tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    ready.wait()


def _together(work: Callable[..., None], directory: Path, processes: int) -> float:
    """Seconds from when all processes are ready to when the last is done."""
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(processes + 1)
    started = [context.Process(target=work, args=(directory, part, processes, ready)) for part in range(processes)]
    for process in started:
        process.start()
    ready.wait(120)
    began = time.perf_counter()
    ready.wait(600)
    seconds = time.perf_counter() - began
    for process in started:
        process.join(60)
    return seconds


SIDES: dict[str, Callable[[Path], float]] = {
    "ours, two processes": lambda directory: ours(directory, PROCESSES),
    "ours, one process": lambda directory: ours(directory, 1),
    "datasets.map, two processes": mapped,
    "ceiling": ceiling,
}


def tell(rates: dict[str, float]) -> None:
    best = rates["ours, two processes"]
    print("\n| what | rows/s | ours, two processes, is |\n|---|---|---|")
    for side, rate in rates.items():
        print(f"| {side} | {rate:,.0f} | {best / rate:.2f} |")


if __name__ == "__main__":
    sys.exit(main())
