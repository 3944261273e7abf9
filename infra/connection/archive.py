"""The agent, as one archive of standard-library Python, and how it is started on a host.

Decision: an archive is named by its content. A host keeps each version that a job there may be running, and a version
that is there is not sent again.
"""

import base64
import hashlib
import io
import zipfile
from functools import cache
from pathlib import Path

import infra
import rollouts_core
from infra.connection import loader

ALONG = (
    "__init__.py", "store/__init__.py", "store/locks.py", "store/flush.py", "errors.py", "loopback.py",
    "network.py", "weight_changes.py",
)  # fmt: skip
"""Modules of the library that the agent uses; they, too, need the standard library only."""
MAIN = "import sys\n\nfrom infra.host.agent import main\n\nsys.exit(main(sys.argv[1:]))\n"
LOAD = "import base64,sys;exec(base64.b64decode(sys.argv[1]))"
EPOCH = (1980, 1, 1, 0, 0, 0)


@cache
def agent_archive() -> tuple[str, bytes]:
    """Digest and bytes of the archive; the same bytes for the same code."""
    here, library = Path(infra.__file__).parent, Path(rollouts_core.__file__).parent
    files = {"__main__.py": MAIN, "infra/__init__.py": ""}
    files |= {f"infra/host/{path.name}": path.read_text() for path in sorted((here / "host").glob("*.py"))}
    files |= {f"rollouts_core/{name}": (library / name).read_text() for name in ALONG}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name, EPOCH), text)
    return hashlib.sha256(content.getvalue()).hexdigest(), content.getvalue()


def load_command(python: str, work: str) -> list[str]:
    """Starts the agent there. Encoded, so that no login shell finds anything in it to interpret."""
    digest, archive = agent_archive()
    code = base64.b64encode(Path(loader.__file__).read_bytes()).decode()
    return [python, "-c", LOAD, code, work, digest, str(len(archive))]
