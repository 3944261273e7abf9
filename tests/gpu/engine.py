"""The embedded engine on the device: greedy answers of transformers, log-probabilities of the trainer."""

import sys
from typing import Any

import numpy as np
import torch

from rollouts_core.data.tokenized import Example
from rollouts_core.inference.engine import Completion, GenerationRequest
from rollouts_core.inference.torch_engine import TorchEngine, copy_of
from rollouts_core.training.collate import pack_batch
from rollouts_core.training.policy import Policy
from tests.gpu.attention import FAMILIES, seeded_model
from tests.gpu.rows import tell

ANSWER, CONTEXT = 48, 128


def main(device: str) -> None:
    precise = torch.backends.cuda.matmul
    precise.allow_tf32 = False
    for name in ("qwen3, shared key heads", "qwen2, windows", "gemma2, soft caps"):
        model = seeded_model(FAMILIES[name](), device, torch.float32)
        requests = _requests(0.0)
        answers = TorchEngine(copy_of(model), CONTEXT, 8).generate(requests)
        equal = sum(
            list(answer.tokens) == _theirs(model, request) for request, answer in zip(requests, answers, strict=True)
        )
        tell(f"{name}: greedy answers", f"{equal} of {len(requests)} are transformers'", equal == len(requests))
        for dtype in (torch.float32, torch.bfloat16):
            own = seeded_model(FAMILIES[name](), device, dtype)
            sampled = _requests(1.0)
            made = TorchEngine(copy_of(own), CONTEXT, 8).generate(sampled)
            apart = apart_from_trainer(own, sampled, made)
            tell(
                f"{name}: log-probabilities in {str(dtype).removeprefix('torch.')}",
                f"mean {apart.mean():.2e}, largest {apart.max():.2e} from the trainer's",
                bool(apart.mean() < (1e-5 if dtype == torch.float32 else 0.03)),
            )


def _requests(temperature: float) -> list[GenerationRequest]:
    random = np.random.default_rng(0)
    prompts = [random.integers(1, 512, 5 + 7 * number).tolist() for number in range(8)]
    return [GenerationRequest(f"r{n}", tuple(p), ANSWER, (), temperature, n) for n, p in enumerate(prompts)]


def _theirs(model: Any, request: GenerationRequest) -> list[int]:
    prompt = torch.tensor([request.prompt_tokens], device=next(model.parameters()).device)
    with torch.no_grad():
        whole = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=ANSWER, min_new_tokens=ANSWER,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    found: list[int] = whole[0, prompt.shape[1] :].tolist()
    return found


def apart_from_trainer(model: Any, requests: list[GenerationRequest], made: list[Completion]) -> torch.Tensor:
    examples = []
    for request, answer in zip(requests, made, strict=True):
        tokens = np.array([*request.prompt_tokens, *answer.tokens], np.int32)
        mask = (np.arange(len(tokens)) >= len(request.prompt_tokens)).astype(np.int32)
        examples.append(Example(tokens, mask, 0))
    with torch.no_grad():
        scores = Policy(model)(pack_batch(examples, 1.0).to(next(model.parameters()).device))
    told = torch.tensor([value for answer in made for value in answer.log_probs])
    return (scores.logprobs_M.cpu() - told).abs()


if __name__ == "__main__":
    main(sys.argv[1])
