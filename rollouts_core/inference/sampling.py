"""Sampling with draws that belong to the request.

Decision: the draw for a request's t-th token is a hash of (seed, t), a counter-based generator (the finaliser of
SplitMix64: Steele, Lea, Flood 2014, OOPSLA), not the next number of a shared stream. So it depends neither on which
requests share the batch nor on their order, and a resumed request goes on with the draws it would have had.

Legend: B requests, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from rollouts_core.inference.engine import Truncation

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def sample_tokens(
    logits_BV: torch.Tensor,
    temperatures_B: torch.Tensor,
    uniforms_B: torch.Tensor,
    truncations: Sequence[Truncation] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their log-probabilities, both of shape B. `truncations`: of each request, or none at all.

    A draw u in [0, 1) picks the first token whose cumulative probability exceeds u; temperature 0 picks the likeliest.
    Log-probabilities are those of softmax(logits / temperature), for temperature 0 of softmax(logits), over all tokens:
    a truncation changes which are drawn, and not what is told of them.
    """
    greedy_B = temperatures_B == 0
    scale_B = torch.where(greedy_B, torch.ones_like(temperatures_B), temperatures_B)
    logprobs_BV = torch.log_softmax(logits_BV.float() / scale_B[:, None], dim=-1)
    probs_BV = logprobs_BV.double().exp()
    for row, truncation in enumerate(truncations):
        if not truncation.keeps_all:
            probs_BV[row] *= kept_tokens(probs_BV[row], truncation)
    cumulative_BV = probs_BV.cumsum(dim=-1)
    targets_B1 = (uniforms_B * cumulative_BV[:, -1])[:, None]
    drawn_B = torch.searchsorted(cumulative_BV, targets_B1, right=True)[:, 0].clamp(max=logits_BV.shape[-1] - 1)
    tokens_B = torch.where(greedy_B, logits_BV.argmax(dim=-1), drawn_B)
    return tokens_B, logprobs_BV.gather(-1, tokens_B[:, None])[:, 0]


def kept_tokens(probs_V: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    """True where a token may be drawn. Of equally likely ones the first come first."""
    sorted_V, order_V = probs_V.sort(descending=True, stable=True)
    if truncation.top_k:
        sorted_V = sorted_V[: truncation.top_k]
    before_V = sorted_V.cumsum(0) - sorted_V
    kept_V = (before_V < truncation.top_p * sorted_V.sum()) & (sorted_V >= truncation.min_p * sorted_V[0])
    return torch.zeros_like(probs_V, dtype=torch.bool).scatter_(0, order_V[: len(kept_V)], kept_V)


def uniform_draws(seeds_B: npt.NDArray[np.uint64], positions_B: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1), each a function of its own seed and position alone."""
    with np.errstate(over="ignore"):
        bits_B = _mix(_mix(seeds_B + _GOLDEN) + (positions_B + np.uint64(1)) * _GOLDEN)
    return (bits_B >> np.uint64(11)).astype(np.float64) * 2.0**-53


def request_seed(*parts: int) -> int:
    """A 63-bit seed from whole numbers such as (run seed, step, prompt, sample)."""
    state = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            state = _mix(state + np.uint64(part) + _GOLDEN)
    return int(state[0] >> np.uint64(1))


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    mixed: npt.NDArray[np.uint64] = value ^ (value >> np.uint64(31))
    return mixed
