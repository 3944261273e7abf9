"""How batches of samples are generated."""

from dataclasses import dataclass, field

from rollouts_core.config import RLConfig
from rollouts_core.inference.engine import EVERYTHING, Truncation
from rollouts_core.rewards.scoring import ScoringSettings


@dataclass(frozen=True)
class RolloutConfig:
    """How a batch of samples is generated."""

    batch_size: int
    """Prompts."""
    n_samples_per_prompt: int
    max_new_tokens: int
    temperature: float
    seed: int
    truncation: Truncation = EVERYTHING
    stop: tuple[str, ...] = ()
    """Texts that end an answer."""
    over_sampling_factor: float = 1.0
    """Groups under way for each group of the batch."""
    max_concurrent_samples: int = 1024
    max_staleness: int = 0
    """Training steps by which a sample's oldest token may be behind the weights it trains; 0 is on-policy."""
    versions_per_step: int = 1
    """Weight versions that a training step makes."""
    sample_seconds: float = 1800.0
    """Deadline of one sample, tries again included."""
    scoring: ScoringSettings = field(default_factory=ScoringSettings)
    batch_seconds: float = 6 * 3600.0
    """Deadline of one batch."""

    def is_stale(self, oldest: int | None, version: int) -> bool:
        """Whether a token of version `oldest` is too old to train weights of `version`."""
        return oldest is not None and version - oldest > self.max_staleness * self.versions_per_step


def rollout_config(training: RLConfig, seed: int, reward: str) -> RolloutConfig:
    """The settings in a config. `reward` is its name, for messages."""
    rollouts = training.rollouts
    return RolloutConfig(
        batch_size=training.batch_size,
        n_samples_per_prompt=training.n_samples_per_prompt,
        max_new_tokens=training.max_new_tokens,
        temperature=training.temperature,
        seed=seed,
        truncation=Truncation(training.top_p, training.top_k, training.min_p),
        stop=training.stop,
        over_sampling_factor=rollouts.over_sampling_factor,
        max_concurrent_samples=rollouts.max_concurrent_samples,
        max_staleness=rollouts.max_staleness,
        versions_per_step=training.minibatches,
        sample_seconds=rollouts.sample_seconds,
        batch_seconds=rollouts.batch_seconds,
        scoring=ScoringSettings(reward, rollouts.reward_seconds, training.reward_failure),
    )
