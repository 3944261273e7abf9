"""Statistics of scores: pass@k, intervals, and the comparison of two policies on the same prompts.

Decision: the random sample consists of prompts, not of answers. So the answers to a prompt are averaged first, and
intervals and tests are over prompts. Otherwise ten answers to each of fifty prompts would count as five hundred.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
RESAMPLES = 4_000
AT_ONCE = 2_000_000
EXACT = 14
"""Up to so many differing prompts all signs are tried, 16,384 of them."""


@dataclass(frozen=True)
class Interval:
    """A mean over prompts, and where it lies with 95 % confidence."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """How far one policy is above another on the same prompts."""

    difference: Interval
    p_value: float
    """How often as large a difference, up or down, would come if the two were alike."""
    better: int
    """Prompts."""
    worse: int


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that one of k samples is correct, estimated without bias from n >= k: 1 - C(n - c, k) / C(n, k)
    (arXiv 2107.03374, eq. 1). Raises ValueError for k above n."""
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples of a prompt, and there are {samples}")
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def wilson_interval(correct: float, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """The score interval of a binomial share (Wilson 1927, JASA 22): sound near 0 and 1, unlike the normal one."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = correct / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z * sqrt(share * (1 - share) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def bootstrap_interval(scores: Sequence[float], seed: int = 0) -> Interval:
    """The percentile bootstrap over prompts (Efron 1979), seeded."""
    values = np.asarray(scores, np.float64)
    random = np.random.default_rng(seed)
    means = [values[random.integers(0, len(values), (count, len(values)))].mean(1) for count in _pieces(len(values))]
    return _interval(values, np.concatenate(means))


def compare(scores: Sequence[float], others: Sequence[float], seed: int = 0) -> Comparison:
    """Paired by prompt: the interval of the mean difference, and a sign-flip test of it (Fisher 1935).

    The test is exact where few prompts differ, and drawn at random where many do. Raises ValueError for unlike lengths.
    """
    if len(scores) != len(others):
        raise ValueError(f"{len(scores)} and {len(others)} scores are not of the same prompts")
    differences = np.asarray(scores, np.float64) - np.asarray(others, np.float64)
    return Comparison(
        bootstrap_interval(differences.tolist(), seed),
        _sign_flip(differences[differences != 0], seed),
        int((differences > 0).sum()),
        int((differences < 0).sum()),
    )


def _interval(values: Floats, means: Floats) -> Interval:
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(values.mean()), float(low), float(high))


def _sign_flip(differing: Floats, seed: int) -> float:
    count = len(differing)
    if not count:
        return 1.0
    observed = abs(differing.sum())
    if count <= EXACT:
        signs = 1.0 - 2.0 * (np.arange(2**count)[:, None] >> np.arange(count) & 1)
        return float((abs(signs @ differing) >= observed - 1e-12).mean())
    random, as_large = np.random.default_rng(seed), 0
    for rows in _pieces(count):
        signs = 1.0 - 2.0 * random.integers(0, 2, (rows, count), dtype=np.int8)
        as_large += int((abs(signs @ differing) >= observed - 1e-12).sum())
    return (1 + as_large) / (1 + RESAMPLES)


def _pieces(width: int) -> list[int]:
    """The resamples in parts of a few megabytes."""
    rows = max(1, AT_ONCE // width)
    return [min(rows, RESAMPLES - done) for done in range(0, RESAMPLES, rows)]
