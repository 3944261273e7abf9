"""Builds a host's Python environment: `environment DIRECTORY`, run as a job.

Decision: an environment is built under another name in the directory of environments, and renamed when it imports what
jobs import; its `environment.json` lists its packages. So an environment with its final name is complete. Programs in
its `bin` still name the old place, so everything is started as `bin/python -m ...`.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

NAME = "environment.json"
DEADLINE = 3600.0
VERSIONS = (
    "import json; from importlib.metadata import distributions; "
    "print(json.dumps({d.metadata['Name']: d.version for d in distributions()}))"
)


def main(directory: Path) -> int:
    """Build what `spec.json` there asks for. Returns the exit status; the installers' words are in the log."""
    spec = json.loads((directory / "spec.json").read_text())
    place = Path(spec["place"])
    if (place / NAME).exists():
        return 0
    building = place.with_name(f".{place.name}.building")
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    alone = os.open(place.parent, os.O_RDONLY)
    fcntl.flock(alone, fcntl.LOCK_EX)  # another job may be building the same; the job's time limit ends this wait
    if (place / NAME).exists():
        return 0
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(mode=0o700)
    try:
        began = time.monotonic()
        installer = _install(spec, building, directory / "requirements.txt")
        python = str(building / "bin" / "python")
        _add_files(python, spec.get("files") or {})
        imported = subprocess.run([python, "-c", spec["check"]], timeout=DEADLINE, check=True, capture_output=True)
        versions = subprocess.run([python, "-c", VERSIONS], timeout=DEADLINE, check=True, capture_output=True)
        described = {
            "installer": installer,
            "seconds": round(time.monotonic() - began, 1),
            "imports": json.loads(imported.stdout or b"{}"),
            "versions": json.loads(versions.stdout),
        }
        (building / NAME).write_text(json.dumps(described))
        building.rename(place)
    except subprocess.CalledProcessError as error:
        print((error.stderr or b"").decode(errors="replace"), file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return 0


def _install(spec: dict[str, object], building: Path, requirements: Path) -> str:
    """Install the packages with uv if the host has it, otherwise with venv and pip. Returns the tool's name."""
    pins, wheels = spec["requirements"], spec["wheels"]
    assert isinstance(pins, list), "a list of requirements"
    requirements.write_text("".join(f"{pin}\n" for pin in pins))
    offline = ["--no-index", "--find-links", str(wheels)] if wheels else []
    offline += ["--no-deps"] if spec.get("no_deps") else []
    python = str(building / "bin" / "python")
    uv = shutil.which("uv", path=f"{os.environ.get('PATH', '')}:{Path.home() / '.local' / 'bin'}")
    if uv:
        _run([uv, "venv", "--quiet", "--relocatable", "--python", sys.executable, "--allow-existing", str(building)])
        _run([uv, "pip", "install", "--python", python, *offline, "-r", str(requirements)])
        return "uv"
    _run([sys.executable, "-m", "venv", str(building)])
    pip = [python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    _run([*pip, *offline, "-r", str(requirements)])
    return "pip"


def _add_files(python: str, files: dict[str, str]) -> None:
    """Modules of ours beside those that were installed."""
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(command, timeout=DEADLINE, check=True, capture_output=True, text=True).stdout.strip()
    for name, text in files.items():
        (Path(packages) / Path(name).name).write_text(text)


def _run(command: list[str]) -> None:
    """uv does not read pip's settings; where wheels are found is passed on to it."""
    print(f"$ {' '.join(command)}", flush=True)
    found = os.environ.get("PIP_FIND_LINKS")
    environment = {**os.environ, **({"UV_FIND_LINKS": found} if found else {})}
    subprocess.run(command, timeout=DEADLINE, check=True, stdin=subprocess.DEVNULL, env=environment)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
