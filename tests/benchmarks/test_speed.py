"""What things cost, as medians and ratios of one run: `make benchmark`. Nothing here asserts on time."""

import pytest
import torch

from rollouts_core.data.collate import collate_batch, learnt_tokens
from rollouts_core.data.tokenized import Example
from rollouts_core.training.losses import create_cross_entropy_loss
from rollouts_core.training.pytorch import create_pytorch_backend
from tests.benchmarks.generation import VOCABULARY, model
from tests.benchmarks.timing import alternately

pytestmark = pytest.mark.benchmark


def test_sft_step_beside_a_bare_loop() -> None:
    examples = [Example(row, (row * 0 + 1)) for row in torch.randint(1, VOCABULARY, (32, 64)).numpy()]
    trained, bare = model(), model()
    backend = create_pytorch_backend(trained, create_cross_entropy_loss(), learning_rate=1e-3)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3)

    def ours() -> None:
        backend.forward_backward(collate_batch(examples, float(learnt_tokens(examples)))).result()
        backend.optim_step().result()

    def theirs() -> None:
        tokens = torch.tensor([example.tokens.tolist() for example in examples])
        bare(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    compare("SFT backend", "bare loop", 32 * 64, *alternately(ours, theirs))


def compare(mine: str, other: str, tokens: int, seconds: float, other_seconds: float) -> None:
    ratio = other_seconds / seconds
    print(f"\n{mine} {tokens / seconds:,.0f} tokens/s, {other} {tokens / other_seconds:,.0f}, ratio {ratio:.2f}")
