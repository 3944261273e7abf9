"""Resident memory of demonstrations that are trained on: `python -m tests.benchmarks.example_memory [GB ...]`.

Sets of rows of 1,000 random tokens, five bytes a token, are written as Parquet; a fresh process opens them as SFT does,
and reads 200 batches of 64 rows in random order. Prints the peak above what the process had before, and the seconds of
opening and of a batch.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollouts_core.data.tokenized import EXAMPLES, GROUP_ROWS

TOKENS, SHARD = 1000, 20_000
INSIDE = """
import sys, time; from pathlib import Path
import numpy as np
from rollouts_core.data.example_rows import ExampleRows
from rollouts_core.memory import begin_peak, peak_bytes
before = peak_bytes("cpu")
began = time.perf_counter()
rows = ExampleRows([Path(sys.argv[1]) / "demonstrations"], Path(sys.argv[1]))
opened = time.perf_counter() - began
draw, began = np.random.default_rng(0), time.perf_counter()
for _ in range(200):
    batch = [rows[int(place)] for place in draw.integers(0, len(rows), 64)]
print(f"{(peak_bytes('cpu') - before) / 2**20:,.0f} MiB, opened in {opened:.1f} s, "
      f"{(time.perf_counter() - began) / 200 * 1000:.2f} ms a batch")
"""


def main() -> None:
    for gigabytes in [float(text) for text in sys.argv[1:]] or [0.05, 0.5, 2.0]:
        with tempfile.TemporaryDirectory() as made:
            _write(Path(made) / "demonstrations", int(gigabytes * 1e9 / 5 / TOKENS))
            command = [sys.executable, "-c", INSIDE, made]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            print(f"{gigabytes} GB: {done.stdout.strip()}", flush=True)


def _write(directory: Path, rows: int) -> None:
    directory.mkdir()
    draw = np.random.default_rng(0)
    for number, begin in enumerate(range(0, rows, SHARD)):
        count = min(SHARD, rows - begin)
        offsets = np.arange(0, (count + 1) * TOKENS, TOKENS, dtype=np.int32)
        ids = pa.ListArray.from_arrays(offsets, draw.integers(0, 150_000, count * TOKENS, np.int32))
        mask = pa.ListArray.from_arrays(offsets, draw.integers(0, 2, count * TOKENS, np.int8))
        length = pa.array(np.full(count, TOKENS, np.int32))
        table = pa.table([ids, mask, length, length, length], schema=EXAMPLES)
        pq.write_table(table, directory / f"{number:05d}.parquet", compression="zstd", row_group_size=GROUP_ROWS)


if __name__ == "__main__":
    main()
