"""Questions that a calculator helps with: the tool `calculate`."""

import ast
import operator
from collections.abc import Callable

from rollouts_core.environments.environment import Functions
from rollouts_core.environments.shipped.questions import questions
from rollouts_core.environments.tools import tool

Number = int | float
BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
LARGEST = 10**30
LONGEST = 200


def calculator(question: str = "question", system: str = "") -> Functions:
    asked = questions(question, system)
    return Functions(asked.messages, (tool(calculate),))


def calculate(expression: str) -> str:
    """The value of an arithmetic expression of numbers, + - * / // % and brackets."""
    if len(expression) > LONGEST:
        raise ValueError(f"an expression has at most {LONGEST} characters")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            found: Number = value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            found = -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            found = BINARY[type(op)](_value(left), _value(right))
        case _:
            raise ValueError(f"this is no arithmetic: {ast.unparse(node)}")
    if abs(found) > LARGEST:
        raise ValueError("the value is too large")
    return found
