"""Files of this machine as trees for a host: the library's code, wheels, inputs.

Decision: a tree is named by its content. A host that has it is sent nothing.
"""

from collections.abc import Sequence
from pathlib import Path

import rollouts_core
from infra.host.trees import Entry
from rollouts_core.store.digests import known_digests


def library_tree() -> tuple[Path, list[Entry]]:
    """The library's directory, and its files as they lie below `rollouts_core/` on a host."""
    root = Path(rollouts_core.__file__).parent
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.suffix in (".py", ".j2"))
    return root.parent, tree_of(root.parent, files)


def tree_of(root: Path, files: Sequence[Path]) -> list[Entry]:
    """Entries of files below a directory; what has not changed since it was last read is not read again."""
    digests = known_digests(files)
    return [
        (path.relative_to(root).as_posix(), path.stat().st_size, digest)
        for path, digest in zip(files, digests, strict=True)
    ]
