"""Resident memory of data that are trained on: `python -m tests.benchmarks.example_memory [GB ...]`.

Sets of rows of 1,000 random tokens, five bytes a token, are written as Parquet: demonstrations, and preferences of two
answers of 500. A fresh process opens them as SFT and DPO do, and reads 200 batches of 64 rows in random order. Prints
the peak above what the process had before, and the seconds of opening and of a batch.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollouts_core.data.tokenized import EXAMPLES, GROUP_ROWS, PREFERENCES

TOKENS, SHARD = 1000, 20_000
COLUMNS = {"demonstrations": (EXAMPLES, 1), "preferences": (PREFERENCES, 2)}
"""The schema, and how many lists of tokens a row has."""
INSIDE = """
import sys, time; from pathlib import Path
import numpy as np
from rollouts_core.data.example_rows import ExampleRows, PreferenceRows
from rollouts_core.memory import begin_peak, peak_bytes
before = peak_bytes("cpu")
began = time.perf_counter()
open_rows = {"demonstrations": ExampleRows, "preferences": PreferenceRows}[sys.argv[2]]
rows = open_rows([Path(sys.argv[1]) / sys.argv[2]], Path(sys.argv[1]))
opened = time.perf_counter() - began
draw, began = np.random.default_rng(0), time.perf_counter()
for _ in range(200):
    batch = [rows[int(place)] for place in draw.integers(0, len(rows), 64)]
print(f"{(peak_bytes('cpu') - before) / 2**20:,.0f} MiB, opened in {opened:.1f} s, "
      f"{(time.perf_counter() - began) / 200 * 1000:.2f} ms a batch")
"""


def main() -> None:
    for gigabytes in [float(text) for text in sys.argv[1:]] or [0.05, 0.5, 2.0]:
        for kind in COLUMNS:
            with tempfile.TemporaryDirectory() as made:
                _write(Path(made) / kind, kind, int(gigabytes * 1e9 / 5 / TOKENS))
                command = [sys.executable, "-c", INSIDE, made, kind]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                print(f"{gigabytes} GB of {kind}: {done.stdout.strip()}", flush=True)


def _write(directory: Path, kind: str, rows: int) -> None:
    directory.mkdir()
    draw = np.random.default_rng(0)
    schema, answers = COLUMNS[kind]
    tokens = TOKENS // answers
    for number, begin in enumerate(range(0, rows, SHARD)):
        count = min(SHARD, rows - begin)
        offsets = np.arange(0, (count + 1) * tokens, tokens, dtype=np.int32)
        lists = []
        for _ in range(answers):
            lists.append(pa.ListArray.from_arrays(offsets, draw.integers(0, 150_000, count * tokens, np.int32)))
            lists.append(pa.ListArray.from_arrays(offsets, draw.integers(0, 2, count * tokens, np.int8)))
        numbers = pa.array(np.full(count, TOKENS, np.int32))
        table = pa.table([*lists, *[numbers] * (len(schema) - len(lists))], schema=schema)
        pq.write_table(table, directory / f"{number:05d}.parquet", compression="zstd", row_group_size=GROUP_ROWS)


if __name__ == "__main__":
    main()
