"""What a part of the GPU run tells: rows, each printed when it is known."""

import json
from dataclasses import asdict, dataclass

MARK = "ROW "


@dataclass(frozen=True)
class Row:
    name: str
    value: str
    ok: bool | None = None
    """None where it is a measurement."""


def tell(name: str, value: str, ok: bool | None = None) -> None:
    print(MARK + json.dumps(asdict(Row(name, value, ok))), flush=True)


def read(line: str) -> Row | None:
    """The row of a line, None where it is none."""
    return Row(**json.loads(line.removeprefix(MARK))) if line.startswith(MARK) else None
