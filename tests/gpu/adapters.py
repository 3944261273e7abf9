"""LoRA on the device, and a checkpoint that goes to another device and back."""

import sys
import tempfile
from pathlib import Path

import torch

from rollouts_core.config import LoRAConfig
from rollouts_core.training.collate import learnt_tokens, pack_batch
from rollouts_core.training.objectives import create_cross_entropy_loss
from rollouts_core.training.pytorch import Optimization, PyTorchTrainingBackend, create_pytorch_backend
from tests.gpu.attention import FAMILIES, seeded_model
from tests.gpu.rows import tell
from tests.rollouts_core.training.test_packed import sequences


def main(device: str) -> None:
    there, here = _backend(device), _backend("cpu")
    with tempfile.TemporaryDirectory() as directory:
        first, second = Path(directory) / "first", Path(directory) / "second"
        losses = [_step(there, seed) for seed in range(6)]
        first.mkdir()
        there.save(first).result()
        here.load(first)
        apart = abs(_step(here, 6) / _step(there, 6) - 1)
        tell("LoRA", f"losses {losses[0]:.4f} to {losses[-1]:.4f}", losses[-1] < losses[0])
        tell("a checkpoint to the CPU", f"the next loss is {apart:.1e} apart", apart < 1e-3)
        second.mkdir()
        here.save(second).result()
        there.load(second)
        apart = abs(_step(here, 7) / _step(there, 7) - 1)
        tell("and back", f"the next loss is {apart:.1e} apart", apart < 1e-3)


def _backend(device: str) -> PyTorchTrainingBackend:
    model = seeded_model(FAMILIES["qwen3, shared key heads"](), device, torch.float32)
    return create_pytorch_backend(model, create_cross_entropy_loss(), Optimization(1e-2), lora=LoRAConfig(rank=8))


def _step(backend: PyTorchTrainingBackend, seed: int) -> float:
    examples = sequences([60, 90, 30], shared=20, seed=seed % 2)
    tokens = float(learnt_tokens(examples))
    summed = backend.forward_backward(pack_batch(examples, tokens))
    backend.optim_step().result()
    return summed.result()["loss_sum"] / tokens


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    main(sys.argv[1])
