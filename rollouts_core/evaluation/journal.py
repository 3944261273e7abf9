"""The answers and results of an evaluation, saved as they come.

Decision: answers are saved before they are scored, and results once they are scored. An evaluation that continues asks
only for what is missing or has failed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollouts_core.evaluation.results import Place, Result, result_from_line
from rollouts_core.metrics.loggers import JSONLLogger, end_lines, read_jsonl
from rollouts_core.rollout.episodes import Episode
from rollouts_core.rollout.groups import Answer, answer_from_data, answer_to_data
from rollouts_core.types import Prompt


class EvaluationJournal:
    """The answers and results of an evaluation so far, in a directory."""

    def __init__(self, directory: Path) -> None:
        answers, results = directory / "answers.jsonl", directory / "results.jsonl"
        for file in (answers, results):
            end_lines(file)
        kept = {(line["source_row"], line["sample"]): answer_from_data(line["of"]) for line in read_jsonl(answers)}
        self._kept: Mapping[Place, Answer] = kept
        done = [result_from_line(line) for line in read_jsonl(results)]
        self._done: Mapping[Place, Result] = {result.place: result for result in done if not result.error}
        self._answers, self._results = JSONLLogger(answers), JSONLLogger(results)

    def answer(self, prompt: Prompt, number: int) -> Answer | None:
        """The saved answer to the prompt; None if there is none, or if the prompt has changed."""
        there = self._kept.get((prompt.source_row, number))
        other = isinstance(there, Episode) and there.trajectory.start.messages != prompt.messages
        return None if other else there

    def result(self, prompt: Prompt, number: int) -> Result | None:
        """The result of this row."""
        there = self._done.get((prompt.source_row, number))
        return there if there and _json(there.metadata) == _json(dict(prompt.metadata)) else None

    def answered(self, prompt: Prompt, number: int, answer: Answer) -> None:
        line = {"source_row": prompt.source_row, "sample": number, "of": answer_to_data(answer)}
        self._answers.log(line, 0)

    def scored(self, results: Sequence[Result]) -> None:
        for result in results:
            self._results.log(asdict(result), 0)


def _json(value: Any) -> str:
    return json.dumps(value, default=str, sort_keys=True)
