"""The environment that jobs run in, recorded as an artifact: interpreter, libraries, and that they import."""

import json
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime

from infra.errors import MachineError
from rollouts_core.store.fingerprint import installed_versions
from rollouts_core.store.keys import key_of
from rollouts_core.store.making import making
from rollouts_core.store.manifest import ArtifactId, Provenance
from rollouts_core.store.store import Store

LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "pyarrow", "numpy", "pydantic")
CHECK = (
    "import json, pyarrow, pydantic, safetensors, tokenizers, torch, transformers; "
    "print(json.dumps({'cuda': torch.cuda.is_available(), 'threads': torch.get_num_threads()}))"
)
DEADLINE = 300.0


def environment_artifact() -> ArtifactId:
    """The artifact that says this environment works. Its key follows from interpreter, platform and versions."""
    return ArtifactId("bootstrap", key_of(_description()))


def check_environment(store: Store) -> None:
    """Import what jobs import, once, and record it. Raises `MachineError` with the import's last lines."""
    artifact = environment_artifact()
    started, began = datetime.now(UTC), time.perf_counter()
    with making(store, artifact, DEADLINE) as place:
        if place is None:
            return
        try:
            done = subprocess.run(
                [sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=DEADLINE, check=True
            )
        except subprocess.CalledProcessError as error:
            lines = "\n".join(error.stderr.splitlines()[-5:])
            raise MachineError(f"the environment does not work; install with `make install`.\n{lines}") from None
        (place.out / "environment.json").write_text(json.dumps({**_description(), **json.loads(done.stdout)}))
        described = _description()
        provenance = Provenance(
            version=1,
            spec=described,
            inputs={},
            external={},
            code={},
            git_commit=None,
            libraries=installed_versions(LIBRARIES),
            host={"platform": platform.platform(), "python": platform.python_version()},
            started_at=started.isoformat(timespec="seconds"),
            seconds=round(time.perf_counter() - began, 3),
            summary={},
        )
        place.publish(provenance)


def _description() -> dict[str, object]:
    return {
        "python": platform.python_version(),
        "interpreter": sys.executable,
        "platform": platform.platform(),
        "libraries": installed_versions(LIBRARIES),
    }
