"""The start of the `rollouts` command: checks that what it needs is installed before it imports it.

Decision: the command is in this package because its name is unique. `flows`, `tasks`, `infra` and `configs` may also be
packages of another distribution in the same environment, and would be imported instead of ours.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

OURS = ("flows", "tasks", "infra", "configs")
NEEDED = {"prefect": "pipeline", "paramiko": "pipeline"}
"""Package to the extra that installs it."""


def main() -> int:
    """Run the command line. Returns its exit status, 1 where something is missing."""
    if problems := [*hidden_packages(), *missing_packages()]:
        print("\n".join(f"error: {problem}" for problem in problems), file=sys.stderr)
        return 1
    return int(import_module("flows.cli").main())


def hidden_packages() -> list[str]:
    """A message for each package of ours that another package of the same name hides."""
    home = Path(__file__).parents[1]
    told = []
    for name in OURS:
        spec = find_spec(name)
        places = [Path(place).parent for place in (spec.submodule_search_locations or [])] if spec else []
        if home not in places:
            told.append(
                f"the package `{name}` is another's here ({', '.join(map(str, places)) or 'it has none'}), and hides "
                f"that of rollouts in {home}: install rollouts in an environment of its own"
            )
    return told


def missing_packages() -> list[str]:
    missing = {extra for package, extra in NEEDED.items() if find_spec(package) is None}
    return [f"the command needs more than the library: pip install 'rollouts[{extra}]'" for extra in sorted(missing)]
