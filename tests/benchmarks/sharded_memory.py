"""What a rank holds, phase by phase, when 1, 2 and 4 ranks share a model: `python -m tests.benchmarks.sharded_memory`.

Anonymous memory (pages of files that are mapped do not count), above what the process had when torch was imported. The
model is drawn, written as a model directory, and read from there. Beside each peak: the peak over what should be there,
which is weights, gradients and AdamW's moments in float32 divided by the ranks, and one layer, gathered, with its
gradient; the largest layer is that of embeddings and head.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GIB = 2**30
SHAPES = {
    "0.5B": {"hidden_size": 896, "num_hidden_layers": 25, "num_attention_heads": 14, "intermediate_size": 4864},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128},
}
VOCABULARY = {"0.5B": 151_936, "tiny": 1000}
EVERY = 0.01
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
"""Freed memory goes back to the system at once; else glibc keeps some, and what is kept is not what is held."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--model", choices=SHAPES, default="0.5B")
    parser.add_argument("--inside", type=Path)
    arguments = parser.parse_args()
    if arguments.inside:
        _rank(arguments.inside)
        return
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        subprocess.run([sys.executable, "-c", _MAKE, str(directory / "model"), arguments.model], check=True)
        for ranks in arguments.ranks:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--log-dir=/dev/null"]
            command += [f"--nproc-per-node={ranks}", "-m"]
            command += ["tests.benchmarks.sharded_memory", "--inside", str(directory)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | MALLOC)
            assert done.returncode == 0, done.stderr
            _tell(ranks, directory)


_MAKE = """
import sys; from pathlib import Path
from tests.benchmarks.sharded_memory import make; make(Path(sys.argv[1]), sys.argv[2])
"""


def make(directory: Path, shape: str) -> None:
    """The model's directory, written as it is drawn."""
    import torch
    from transformers import AutoConfig

    from rollouts_core.training.blank import drawn_weights
    from rollouts_core.training.tensor_file import write_tensors

    config = AutoConfig.for_model("qwen2", vocab_size=VOCABULARY[shape], tie_word_embeddings=True, **SHAPES[shape])
    config.num_key_value_heads = 2
    config.save_pretrained(directory)
    names = [f"{'x' * 100}{number}" for number in range(1000)]
    list(write_tensors(directory / "model.safetensors", names, drawn_weights(config, torch.bfloat16, 0)))


def _rank(directory: Path) -> None:
    import torch

    from rollouts_core.config import BackendConfig, SFTConfig
    from rollouts_core.stages.job import end_process
    from rollouts_core.training.checkpoint import Checkpoints
    from rollouts_core.training.collate import pack_batch
    from rollouts_core.training.configured import backend_for
    from rollouts_core.training.exporting import save_policy
    from rollouts_core.training.fsdp import FSDPTrainingBackend, serve
    from rollouts_core.training.origins import origin_in
    from rollouts_core.training.pytorch import PyTorchTrainingBackend
    from rollouts_core.training.ranks import join_ranks, leave_ranks
    from tests.rollouts_core.training.test_packed import sequences

    torch.manual_seed(0)
    ranks = join_ranks("cpu")
    watch = _Watch()
    origin = origin_in(directory / "model", "bfloat16")
    with watch.phase("load"):
        model = origin.blank()
        backend = backend_for(SFTConfig(steps=10), BackendConfig(), model, ranks=ranks, origin=origin)
    if not isinstance(backend, FSDPTrainingBackend):
        assert isinstance(backend, PyTorchTrainingBackend)
        with watch.phase("all"):
            serve(ranks, backend)
        leave_ranks()
        end_process(0)
    with watch.phase("step"):
        for step in range(2):
            for number in range(ranks.size):
                backend.forward_backward(pack_batch(sequences([16], seed=step * 100 + number), 16.0))
            backend.optim_step().result()
    with watch.phase("checkpoint"), Checkpoints(directory / "checkpoints") as checkpoints:
        checkpoints.begin(1, backend.save)
    no_tokenizer = SimpleNamespace(save_pretrained=lambda place: Path(place).mkdir())
    with watch.phase("export"):
        save_policy(model, no_tokenizer, directory / f"policy-{ranks.size}", backend.get_weights().result())
    with watch.phase("sync"):
        for _ in backend.get_weights().result().values():
            """An engine takes them, bucket by bucket."""
    units = _units(model)
    told = {"peaks": watch.peaks, "parameters": sum(units), "largest": max(units)}
    (directory / "told.json").write_text(json.dumps(told))
    ranks.tell({"do": "end"})
    leave_ranks()
    end_process(0)


def _units(model: Any) -> list[int]:
    """Parameters of each layer, and of all that is in none."""
    kinds = set(model._no_split_modules)
    layers = [sum(p.numel() for p in m.parameters()) for m in model.modules() if type(m).__name__[4:] in kinds]
    return [*layers, sum(p.numel() for p in model.parameters()) - sum(layers)]


class _Watch:
    """Peaks of the process's anonymous memory, above what it had at first."""

    def __init__(self) -> None:
        self._base = _anonymous()
        self.peaks: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        ended = threading.Event()
        looking = threading.Thread(target=partial(self._look, name, ended))
        looking.start()
        try:
            yield
        finally:
            ended.set()
            looking.join()

    def _look(self, name: str, ended: threading.Event) -> None:
        while True:
            self.peaks[name] = max(self.peaks.get(name, 0), _anonymous() - self._base)
            if ended.wait(EVERY):
                return


def _anonymous() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def _tell(ranks: int, directory: Path) -> None:
    told = json.loads((directory / "told.json").read_text())
    expected = 16 * told["parameters"] / ranks + 8 * told["largest"]
    print(f"{ranks} ranks, {told['parameters'] / 1e6:,.0f}M parameters, expected {expected / GIB:.2f} GiB", flush=True)
    for phase, peak in told["peaks"].items():
        print(f"  {phase:<12} {peak / GIB:6.2f} GiB  {peak / expected:.2f}", flush=True)


if __name__ == "__main__":
    main()
