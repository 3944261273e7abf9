"""A training that is killed and resumed ends with the bits of one that was not."""

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from rollouts_core.training.checkpoint import Checkpoints, last_checkpoint
from rollouts_core.training.collate import learnt_tokens, pack_batch
from rollouts_core.training.objectives import create_cross_entropy_loss
from rollouts_core.training.pytorch import Optimization, create_pytorch_backend
from tests.gpu.attention import FAMILIES, seeded_model
from tests.gpu.rows import tell
from tests.rollouts_core.training.test_packed import sequences

STEPS, SAVED, KILLED = 8, 3, 5


def main(device: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        straight = _elsewhere(device, Path(directory) / "straight", 0)
        killed = _elsewhere(device, Path(directory) / "killed", KILLED)
        resumed = _elsewhere(device, Path(directory) / "killed", 0)
    same = straight.stdout == resumed.stdout and straight.stdout.startswith("sha256")
    tell("killed by kill -9", f"exit status {killed.returncode}", killed.returncode == -signal.SIGKILL)
    told = "the same bits" if same else f"{straight.stdout} and {resumed.stdout} {resumed.stderr[-500:]}"
    tell(f"resumed from step {SAVED} of {STEPS}", told, same)


def _elsewhere(device: str, directory: Path, killed_at: int) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tests.gpu.resume", device, str(directory), str(killed_at)]
    return subprocess.run(command, capture_output=True, text=True, timeout=90)


def train(device: str, directory: Path, killed_at: int) -> None:
    """Steps of which the checkpoint, if there is one, has some already."""
    torch.use_deterministic_algorithms(True, warn_only=device == "cuda")
    model = seeded_model(
        FAMILIES["qwen3, shared key heads"](), device, torch.bfloat16 if device == "cuda" else torch.float32
    )
    backend = create_pytorch_backend(model, create_cross_entropy_loss(), Optimization(1e-3))
    found = last_checkpoint(directory)
    if found:
        backend.load(found[1])
    with Checkpoints(directory) as checkpoints:
        for step in range(found[0] if found else 0, STEPS):
            if step and step == killed_at:
                checkpoints.__exit__(None)
                os.kill(os.getpid(), signal.SIGKILL)
            examples = sequences([60, 90, 30], shared=20, seed=step)
            backend.forward_backward(pack_batch(examples, float(learnt_tokens(examples))))
            backend.optim_step().result()
            if step + 1 == SAVED:
                checkpoints.begin(SAVED, backend.save)
    weights = backend.get_weights().result()
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].detach().float().cpu().numpy().tobytes())
    print("sha256", digest.hexdigest())


if __name__ == "__main__":
    if len(sys.argv) > 2:
        train(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main(sys.argv[1])
