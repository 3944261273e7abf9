"""The environments that are shipped, played by scripts."""

from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts_core.environments.agent import RunConfig, run_agent
from rollouts_core.environments.environment import Environment
from rollouts_core.environments.registry import check_environment, identify_environment, load_environment
from rollouts_core.environments.sandbox import check_sandbox
from rollouts_core.environments.shipped.calculator import calculate, calculator
from rollouts_core.environments.shipped.guess_number import guess_number
from rollouts_core.environments.shipped.python_code import python_code
from rollouts_core.environments.shipped.questions import questions
from rollouts_core.errors import BadInput
from rollouts_core.types import Message
from rollouts_core.types.episode import AgentState, Answered, StopReason
from tests.rollouts_core.environments.test_agent import Scripted, call, said


def played(environment: Environment, row: dict[str, Any], *answers: Answered) -> AgentState:
    config = RunConfig(Scripted(list(answers)), environment)
    return anyio.run(run_agent, environment.begin(row), config).final


def test_questions_are_asked_as_text_or_as_messages() -> None:
    asked = played(questions(system="Be brief."), {"question": "1+1=", "answer": "2"}, said("2"))
    assert [message.content for message in asked.messages] == ["Be brief.", "1+1=", "2"]
    assert played(questions(), {"prompt": "1+1="}, said("2")).messages[0] == Message("user", "1+1=")
    messages = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
    assert played(questions(), {"messages": messages}, said("3")).messages[0] == Message("user", "1+2=")


def test_the_calculator_calculates() -> None:
    done = played(calculator(), {"question": "?"}, said("", call("calculate", expression="(12+45)*2")), said("114"))
    assert [message.content for message in done.messages] == ["?", "", "114", "114"]


@given(st.integers(-999, 999), st.integers(-999, 999), st.sampled_from("+-*/%"), st.booleans())
def test_arithmetic_is_python_s(a: int, b: int, sign: str, negated: bool) -> None:
    expression = f"-({a}{sign}({b}))" if negated else f"{a} {sign} ({b})"
    try:
        expected = eval(expression)
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            calculate(expression)
        return
    assert float(calculate(expression)) == pytest.approx(expected)


@pytest.mark.parametrize(
    "expression", ["__import__('os')", "x", "2**99", "9" * 201, "(1).real", "[1][0]", "True", "1 if 1 else 2", "1;2"]
)
def test_what_is_no_arithmetic_is_refused(expression: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        calculate(expression)


def test_a_game_is_won_lost_or_misunderstood() -> None:
    row = {"number": 7, "low": 1, "high": 10}
    won = played(guess_number(), row, said("Is it 5?"), said("hm"), said("9"), said("7"))
    assert [m.content for m in won.messages if m.role == "user"][1:] == ["higher", "no number", "lower"]
    assert (won.stop, won.environment["solved"], won.environment["guesses"]) == (StopReason.ENVIRONMENT, True, 4)
    lost = played(guess_number(2), row, said("1"), said("2"))
    assert (lost.stop, lost.environment["solved"]) == (StopReason.ENVIRONMENT, False)


def test_python_is_run_in_the_sandbox() -> None:
    try:
        anyio.run(check_sandbox)
    except BadInput as error:
        pytest.skip(str(error))
    code = "print(open('/etc/passwd').read())"
    answers = (
        said("", call("run_python_code", code="print(6*7)"), call("run_python_code", id="c2", code=code)),
        said("42"),
    )
    done = played(python_code(), {"question": "6*7?"}, *answers)
    first, second = (message.content for message in done.messages if message.role == "tool")
    assert first == "42\n" and "PermissionError" in second


OWN = """
from rollouts_core.environments.environment import Functions
from rollouts_core.environments.tools import tool

def fine():
    return Functions(lambda row: [], (tool(calls),))

def calls(a: int) -> int:
    return a

def breaks():
    raise RuntimeError("no board")

def lacking():
    return object()

def no_tools():
    return Functions(lambda row: [], (len,))

def lacks_something():
    def check():
        from rollouts_core.errors import BadInput
        raise BadInput("no engine room")
    return Functions(lambda row: [], check=check)

class Own:
    def begin(self, row): ...
    def get_tools(self): return []
    async def exec_tool(self, call, state, seconds): ...
    def on_assistant_message(self, message, state): ...
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("fine", ""),
        ("Own", ""),
        ("breaks", "its function or class is called without arguments, and raised RuntimeError: no board"),
        ("lacking", "lacks begin, get_tools, exec_tool, on_assistant_message"),
        ("no_tools", "get_tools returns something that is not a tool"),
        ("nothing", "has no function 'nothing'"),
        ("lacks_something", "no engine room"),
    ],
)
def test_an_environment_of_ones_own_is_looked_at_before_anything_starts(name: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    location = f"{tmp_path}/own.py:{name}"
    if not told:
        check_environment(load_environment(location))
        assert identify_environment(location).identity["function"] == name
        return
    with pytest.raises(BadInput, match=told):
        check_environment(load_environment(location))


def test_shipped_environments_are_there_by_name() -> None:
    for name in ("questions", "calculator", "guess_number", "python_code"):
        assert load_environment(name).get_tools() is not None
        assert identify_environment(name).identity == {"shipped": name}
