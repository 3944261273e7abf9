"""`python -m tests.build_engine sglang`: a real server's environment, below `.engines/`, as bootstrap builds it."""

import json
import sys
import tempfile
from pathlib import Path

from infra.host import environment
from infra.servers.packages import packages_of
from tests.servers import ENGINES


def main(kind: str) -> int:
    if (ENGINES / kind).exists():
        return 0
    packages = packages_of(kind, on_gpu=False)
    spec = {
        "place": str(ENGINES / kind),
        "requirements": list(packages.requirements),
        "wheels": None,
        "check": packages.check,
        "no_deps": packages.no_deps,
        "files": packages.files,
    }
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "spec.json").write_text(json.dumps(spec))
        return environment.main(Path(directory))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
