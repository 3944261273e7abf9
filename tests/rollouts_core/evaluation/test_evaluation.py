"""Evaluation over endpoints: what is counted, what is told, and that nothing is asked twice."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import anyio
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts_core.config import Jsonl
from rollouts_core.data.layouts import NotLaidOutSo, boxed, laid_out
from rollouts_core.data.sources import load_rows
from rollouts_core.environments.environment import Functions
from rollouts_core.environments.shipped.calculator import calculator
from rollouts_core.errors import BadInput, EngineUnavailable
from rollouts_core.evaluation.report import EvaluationReport, compare_results, report_of
from rollouts_core.evaluation.results import Result, read_results, write_results
from rollouts_core.evaluation.run import EvaluationSettings, evaluate
from rollouts_core.evaluation.statistics import pass_at_k, wilson_interval
from rollouts_core.inference.endpoints.service import Service
from rollouts_core.rewards.functions import exact_match
from rollouts_core.rewards.judge import JudgeSettings, judge
from rollouts_core.rewards.reward import GroupReward
from rollouts_core.store.identity import identify_source
from rollouts_core.types import Message, Sample, ToolCall
from rollouts_core.types.episode import AgentState, Answered, Replied, Usage

ROWS = [{"question": str(n), "answer": str(n), "level": "odd" if n % 2 else "even"} for n in range(6)]
SETTINGS = EvaluationSettings(exact_match)


@dataclass
class Oracle:
    """Knows the answers to some questions; gives up on others as often as it is told to."""

    knows: Callable[[str, int], bool] = lambda question, time: True
    away: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)

    async def complete(self, state: AgentState, max_tokens: int | None) -> Answered:
        question = state.messages[-1].content
        self.asked[question] += 1
        time = self.asked[question]
        await anyio.lowlevel.checkpoint()
        if self.away[question] > 0:
            self.away[question] -= 1
            raise EngineUnavailable("the service is away")
        said = question if self.knows(question, time) else "wrong"
        return Answered(Message("assistant", said), Usage(3, 2))


def messages(row: Mapping[str, Any]) -> Sequence[Message]:
    return [Message("user", row["question"])]


def evaluated(
    oracle: Any, rows: Sequence[Mapping[str, Any]] = ROWS, journal: Path | None = None, **settings: Any
) -> EvaluationReport:
    async def run() -> EvaluationReport:
        with anyio.fail_after(60):
            return await evaluate(rows, messages, oracle, replace(SETTINGS, **settings), journal)

    return anyio.run(run)


def test_shares_are_of_prompts_with_their_interval() -> None:
    report = evaluated(Oracle(lambda question, time: question in "0134"), slices=("level", "nothing"))
    assert (report.prompts, report.samples, report.failed) == (6, 6, 0)
    assert report.accuracy.mean == pytest.approx(4 / 6)
    assert (report.accuracy.low, report.accuracy.high) == wilson_interval(4, 6)
    by_level = {value: (part.prompts, part.accuracy.mean) for value, part in report.slices["level"].items()}
    assert by_level == {"even": (3, 2 / 3), "odd": (3, 2 / 3)}
    assert list(report.slices["nothing"]) == [""]
    assert (report.turns, report.tokens, report.tool_use) == (1, 2, 0)


def test_many_samples_and_pass_at_k() -> None:
    """Question n is answered right the first n times of four."""
    report = evaluated(Oracle(lambda question, time: time <= int(question)), samples_per_prompt=4, pass_at=(1, 2, 4))
    right = [min(n, 4) for n in range(6)]
    assert report.accuracy.mean == pytest.approx(fmean(right) / 4)
    for k in (1, 2, 4):
        assert report.pass_at[str(k)].mean == pytest.approx(fmean(pass_at_k(4, count, k) for count in right))
    assert report.pass_at["1"].mean == pytest.approx(report.accuracy.mean)


def test_only_what_is_missing_or_has_failed_is_asked_again(tmp_path: Path) -> None:
    first = Oracle(away=Counter({"2": 1, "4": 1}))
    report = evaluated(first, journal=tmp_path)
    assert (report.prompts, report.failed) == (4, 2)
    assert report.problems[0] == "row 2, sample 0: the service is away"
    with (tmp_path / "answers.jsonl").open("a") as file:
        file.write('{"source_row": 5, "half a li')  # killed while it wrote
    second = Oracle()
    assert evaluated(second, journal=tmp_path).accuracy.mean == 1.0
    assert dict(second.asked) == {"2": 1, "4": 1}


def test_what_is_kept_of_other_rows_is_not_taken_for_these(tmp_path: Path) -> None:
    evaluated(Oracle(), journal=tmp_path)
    others = Oracle()
    report = evaluated(others, [{**row, "question": f"{row['question']}!"} for row in ROWS], tmp_path)
    assert sum(others.asked.values()) == len(ROWS)
    assert report.accuracy.mean == 0.0


def test_an_environment_that_fails_takes_its_own_row_alone() -> None:
    def reply(message: Message, state: AgentState) -> Replied:
        if state.messages[0].content == "3":
            raise KeyError("board")
        return Replied()

    report = anyio.run(evaluate, ROWS, Functions(messages, reply=reply), Oracle(), SETTINGS)
    assert (report.prompts, report.problems) == (5, ("row 3, sample 0: environment: KeyError: 'board'",))


def test_a_reward_that_cannot_be_opened_is_heard_as_it_is() -> None:
    keyless = judge(Service("http://127.0.0.1:1/v1", "m", key_variable="NO_SUCH_KEY"), JudgeSettings("Right."))
    with pytest.raises(BadInput, match="its key is read from the environment variable NO_SUCH_KEY"):
        evaluated(Oracle(), reward=keyless)


def test_an_answer_that_was_not_scored_is_not_asked_for_again(tmp_path: Path) -> None:
    broken = [{"question": "0"}, *ROWS[1:]]
    oracle = Oracle()
    report = evaluated(oracle, broken, tmp_path)
    assert (report.prompts, report.failed) == (5, 1)
    assert "row 0, sample 0: reward given on source row 0, answer '0': raised KeyError: 'answer'" in report.problems
    assert evaluated(oracle, broken, tmp_path).failed == 1
    assert oracle.asked["0"] == 1


def test_one_sample_that_cannot_be_scored_takes_no_other_with_it() -> None:
    """Nor where the group is scored together."""

    def together(samples: Sequence[Sample]) -> list[float]:
        if any(sample.response == "wrong" for sample in samples):
            raise ValueError("no idea")
        return [1.0] * len(samples)

    oracle = Oracle(lambda question, time: question != "3" or time > 1)
    report = evaluated(oracle, samples_per_prompt=2, reward=GroupReward(together))
    assert (report.prompts, report.samples, report.failed) == (6, 11, 1)
    assert report.problems == (
        "row 3, sample 0: reward given on source row 3, answer 'wrong': raised ValueError: no idea",
    )


@pytest.mark.parametrize(
    ("rows", "oracle", "told"),
    [
        ([], Oracle(), "the data set has no rows"),
        ([{"q": 1}], Oracle(), "row 0: the environment cannot begin with it: KeyError: 'question'"),
        (ROWS, Oracle(away=Counter({str(n): 9 for n in range(6)})), "nothing could be scored: 6 problems"),
    ],
)
def test_what_cannot_be_evaluated_is_told(rows: Any, oracle: Oracle, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        evaluated(oracle, rows)


def test_an_environment_is_played_in() -> None:
    @dataclass
    class Caller:
        async def complete(self, state: AgentState, max_tokens: int | None) -> Answered:
            if state.messages[-1].role == "tool":
                return Answered(Message("assistant", state.messages[-1].content))
            call = ToolCall("calculate", {"expression": state.messages[0].content}, "c")
            return Answered(Message("assistant", "", (call,)))

    rows = [{"question": "12*12", "answer": 144}, {"question": "2+", "answer": 2}]
    report = anyio.run(evaluate, rows, calculator(), Caller(), SETTINGS)
    assert (report.accuracy.mean, report.tool_use, report.turns) == (0.5, 1.0, 2.0)


def results(rewards: Sequence[float | None]) -> list[Result]:
    return [
        Result(row, 0, "p", "r", "a", reward, {}, "completed", 1, 0, 1, {"level": row % 2}, None)
        for row, reward in enumerate(rewards)
    ]


def test_two_policies_are_compared_on_the_prompts_both_were_scored_on() -> None:
    found = compare_results(results([1, 1, 1, None, 0]), results([0, 1, 0, 1, 0]))
    assert (found.better, found.worse) == (2, 0)
    assert found.difference.mean == pytest.approx(0.5)
    with pytest.raises(BadInput, match="no prompt in common"):
        compare_results(results([None]), results([1]))


def test_results_survive_their_files(tmp_path: Path) -> None:
    made = [replace(entry, metadata={"level": {"deep": 1}}, rewards={"x": 0.5}) for entry in results([1.0, None, 0.0])]
    write_results(made, tmp_path)
    assert read_results(tmp_path / "samples.jsonl") == made
    table = pq.read_table(tmp_path / "samples.parquet").to_pylist()
    assert [row["reward"] for row in table] == [1.0, None, 0.0]
    assert json.loads(table[0]["metadata"]) == {"level": {"deep": 1}}


def test_an_empty_answer_is_an_answer() -> None:
    @dataclass
    class Silent:
        async def complete(self, state: AgentState, max_tokens: int | None) -> Answered:
            return Answered(Message("assistant", ""))

    assert evaluated(Silent()).accuracy.mean == 0.0


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=6))
def test_every_share_is_between_its_ends(right: list[list[bool]]) -> None:
    made = [
        replace(results([float(answer)])[0], source_row=row, sample=number)
        for row, answers in enumerate(right)
        for number, answer in enumerate(answers)
    ]
    report = report_of(made, (1, 2, 3), ("level",))
    for interval in (report.accuracy, report.reward, *report.pass_at.values()):
        assert 0 <= interval.low <= interval.mean + 1e-9
        assert interval.mean - 1e-9 <= interval.high <= 1


GSM8K = {"question": "How many?", "answer": "It is 40 + 2 = <<40+2=42>>1,042.\n#### 1,042"}
MATH = {
    "problem": "Find $x$.",
    "solution": r"So $x = \boxed{\frac{1}{\sqrt{2}}}$.",
    "level": "Level 5",
    "type": "Algebra",
}


def test_layouts_by_name(tmp_path: Path) -> None:
    for layout, row, answer in (("gsm8k", GSM8K, "1042"), ("math", MATH, r"\frac{1}{\sqrt{2}}")):
        file = tmp_path / f"{layout}.jsonl"
        file.write_text(json.dumps(row) + "\n")
        source = Jsonl(path=file, layout=layout)
        (loaded,) = load_rows(source, identify_source(source))
        assert loaded.messages[0] == Message("user", row.get("question") or row["problem"])
        assert loaded.messages[1] == Message("assistant", row.get("answer") or row["solution"])
        assert loaded.metadata["answer"] == answer
    assert laid_out("math", MATH)["subject"] == "Algebra"
    assert laid_out("math", {**MATH, "solution": "none", "answer": "7"})["answer"] == "7"


@pytest.mark.parametrize(
    ("layout", "row", "told"),
    [
        ("gsm8k", {"question": "q", "answer": "no mark"}, "no '####'"),
        ("gsm8k", {"question": "", "answer": "#### 1"}, "no text under 'question'"),
        ("math", {"problem": "p", "solution": "no box"}, "no .boxed"),
        ("math", {"problem": "p"}, "no text under 'solution'"),
    ],
)
def test_rows_of_another_layout_are_told(layout: str, row: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(NotLaidOutSo, match=told):
        laid_out(layout, row)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    source = Jsonl(path=file, layout=layout)
    with pytest.raises(BadInput, match=f"rows.jsonl:1: no row of the layout {layout}"):
        load_rows(source, identify_source(source))


@given(st.text(alphabet="a{}\\", max_size=12))
def test_what_is_in_a_box_has_its_brackets(inside: str) -> None:
    depth = 0
    for character in inside:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth < 0:
            return
    expected = inside.strip() if depth == 0 else ""
    assert boxed(f"so \\boxed{{{inside}}} it is") in (expected, "")
