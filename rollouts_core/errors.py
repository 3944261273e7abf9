"""Named errors.

There are two families. A `BadInput` must be mended by a person, so it is never retried. All others may be passing
faults of a machine; `infra.jobs.stage_job` says which of them a retry can help.
"""

from collections.abc import Sequence

MISSHAPEN = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""The exceptions of code that meets data of another shape than it expects."""


class RolloutsError(Exception):
    """The base class of all errors that this project raises on purpose."""


class BadInput(RolloutsError):
    """Config, data, model name, reward function or disk is not usable as given.

    `problems` holds one line each: where it is, what is wrong, what to do.
    """

    def __init__(self, problems: str | Sequence[str], where: str = "") -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        self.where = where
        super().__init__(describe(self.problems, where))


class RewardFailed(BadInput):
    """A reward function raised, or returned something that is not a finite number."""


class ContextOverflow(BadInput):
    """Prompt and requested answer do not fit the model's context."""


class WeightMismatch(RolloutsError):
    """New weights do not have the names and shapes of the weights they would replace."""


class NonFiniteGradient(RolloutsError):
    """A gradient is infinite or no number; `passes` are the training batches that made it."""

    def __init__(self, message: str, passes: Sequence[object]) -> None:
        self.passes = tuple(passes)
        super().__init__(message)


class StoreError(RolloutsError):
    """The store cannot be read or written."""


class StoreUnavailable(StoreError):
    """A remote store did not answer; it may again, so a retry mends it."""


class ArtifactDamaged(StoreError):
    """An artifact's files are not what its manifest says."""


class LeaseLost(RolloutsError):
    """Another process may be making the same artifact: what this one makes must not be published."""


def describe(problems: Sequence[str], where: str) -> str:
    heading = f"{where}: " if where else ""
    if len(problems) == 1:
        return heading + problems[0]
    return f"{heading}{len(problems)} problems" + "".join(f"\n  - {problem}" for problem in problems)


class AskedToLeave(RolloutsError):
    """Whoever gave the machine takes it back: a checkpoint is written, and the same job goes on from it elsewhere."""


class OutsideVocabulary(BadInput):
    """A prompt holds token ids that the model does not know."""


class EngineError(RolloutsError):
    """An inference engine could not do what it was asked."""


class EngineUnavailable(EngineError):
    """The engine is away, or an answer broke off. The same request may succeed later, or elsewhere."""


class EngineRefused(EngineError):
    """The engine refuses the request. To try again does not help."""


class MalformedAnswer(EngineError):
    """The engine's answer can't be understood."""


class RolloutsStalled(RolloutsError):
    """No batch came in time; the message names what was waited for."""
