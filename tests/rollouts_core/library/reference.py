"""Write each name's sentence into docs/reference.md anew: `python -m tests.rollouts_core.library.reference`.

A new name is first put there by hand, in the group it belongs to: a row, and a line `::: module.name`.
"""

import re
from pathlib import Path

import rollouts_core as rc
from tests.rollouts_core.library.surface import sentence_of

PAGE = Path(__file__).parents[3] / "docs" / "reference.md"

if __name__ == "__main__":
    page = PAGE.read_text()
    for name in dir(rc):
        row = f"| `rc.{name}` | {sentence_of(name)} |"
        page, found = re.subn(rf"^\| `rc\.{name}` \| .* \|$", lambda _, row=row: row, page, flags=re.MULTILINE)  # type: ignore[misc]
        if not found:
            print(f"{name} is not in {PAGE.name} yet")
    PAGE.write_text(page)
