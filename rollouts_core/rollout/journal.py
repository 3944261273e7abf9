"""The journal of finished rollouts: after a kill, a step trains on the answers that it had generated, and generates
only the rest.

Decision: each answer is one appended line, written as it ends and before anything else is done with it. A line is
whole or, where the process died in its midst, passed over. Lines live until a checkpoint covers their step; a step
that is trained again after a kill finds all its rollouts here. Numbers survive JSON to the last bit, so a step trained
from its journal has the same gradient.
"""

from pathlib import Path

from rollouts_core.metrics.loggers import JSONLLogger, end_lines, read_jsonl
from rollouts_core.rollout.groups import Answer, answer_from_data, answer_to_data


class RolloutJournal:
    """The finished answers of each step, a file per step in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: tuple[int, JSONLLogger] | None = None

    def move(self, directory: Path) -> None:
        """Write to another directory from now on."""
        self._directory, self._open = directory, None

    def finished(self, step: int, weight_version: int) -> dict[str, Answer]:
        """The step's finished answers by request; those of other weights do not belong to it."""
        found = {}
        for line in read_jsonl(self._path(step)):
            answer = answer_from_data(line)
            if set(answer.weight_versions) <= {weight_version}:
                found[answer.request_id] = answer
        return found

    def note(self, step: int, answer: Answer) -> None:
        if self._open is None or self._open[0] != step:
            end_lines(self._path(step))
            self._open = (step, JSONLLogger(self._path(step)))
        self._open[1].log(answer_to_data(answer), step)

    def forget(self, last_step: int) -> None:
        """Drop the steps that a checkpoint covers."""
        for path in self._directory.glob("step-*.jsonl"):
            if int(path.stem.removeprefix("step-")) <= last_step:
                path.unlink()

    def _path(self, step: int) -> Path:
        return self._directory / f"step-{step:08d}.jsonl"
