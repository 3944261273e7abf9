"""What the prompts of RL hold in memory, by their number: `python -m tests.benchmarks.prompt_memory`.

Each number is a process of its own, which opens the prompts and takes a thousand in training's order. Prompts have 200
tokens, a text of 800 characters and a reference answer.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from rollouts_core.data.prompt_table import read_prompts
from rollouts_core.data.prompts import DataBuffer
from rollouts_core.data.tokenized import PROMPTS, write_table

SHARD, TOKENS = 2_000, 200


def write(directory: Path, count: int) -> None:
    draw = np.random.default_rng(0)
    for number in range(count // SHARD):
        rows = range(number * SHARD, (number + 1) * SHARD)
        texts = ["".join(map(chr, draw.integers(97, 123, 4 * TOKENS))) for _ in rows]
        columns = {
            "input_ids": list(draw.integers(0, 50_000, (SHARD, TOKENS), np.int32)), "length": [TOKENS] * SHARD,
            "source_row": list(rows), "messages": [json.dumps([{"role": "user", "content": text}]) for text in texts],
            "metadata": [json.dumps({"answer": str(row)}) for row in rows],
        }  # fmt: skip
        write_table(pa.table(columns, PROMPTS), directory / f"{number:05d}.parquet")


def measure(directory: Path) -> None:
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    prompts = read_prompts(directory)
    prompts.largest_token()
    opened, began = time.perf_counter() - began, time.perf_counter()
    DataBuffer(prompts, 0).get_prompts(1_000)
    taken = time.perf_counter() - began
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{len(prompts):>9,} {grown:>7.0f} MiB {opened:>7.2f} s {taken:>10.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", type=Path)
    parser.add_argument("--counts", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    options = parser.parse_args()
    if options.measure:
        return measure(options.measure)
    print(f"{'prompts':>9} {'memory':>11} {'opened':>9} {'one taken':>13}", flush=True)
    for count in options.counts:
        with tempfile.TemporaryDirectory() as scratch:
            write(Path(scratch), count)
            command = [sys.executable, "-m", "tests.benchmarks.prompt_memory", "--measure", scratch]
            subprocess.run(command, check=True)
    return None


if __name__ == "__main__":
    main()
