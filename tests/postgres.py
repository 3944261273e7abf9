"""A real PostgreSQL server, as Debian has it, on the loopback."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.host.system import free_port

PROGRAMS = Path("/usr/lib/postgresql")
DEADLINE = 30.0


def postgres_impossible() -> str:
    """Why there can be none here; empty where there can."""
    if os.getuid():
        return "a PostgreSQL server of its own user needs root"
    return "" if list(PROGRAMS.glob("*/bin/initdb")) else "a team's server needs PostgreSQL: install postgresql"


@contextmanager
def running_postgres(database: str, user: str, password: str) -> Iterator[str]:
    """Yields its address as SQLAlchemy has it."""
    (programs, *_) = sorted(PROGRAMS.glob("*/bin"), reverse=True)
    home, port = Path(tempfile.mkdtemp(prefix="rollouts-postgres-")), free_port()
    (home / "password").write_text(password)
    for place in (home, home / "password"):
        shutil.chown(place, "postgres", "postgres")
    initdb = [
        programs / "initdb",
        "-D",
        home / "data",
        "-U",
        user,
        "-A",
        "scram-sha-256",
        "--pwfile",
        home / "password",
    ]
    subprocess.run(_as_postgres(initdb), check=True, stdout=subprocess.DEVNULL, cwd=home)
    serve = [programs / "postgres", "-D", home / "data", "-p", port, "-k", home, "-c", "listen_addresses=127.0.0.1"]
    server = subprocess.Popen(_as_postgres(serve), stderr=subprocess.DEVNULL, cwd=home)
    try:
        create = [programs / "createdb", "-h", "127.0.0.1", "-p", port, "-U", user, database]
        end = time.monotonic() + DEADLINE
        while subprocess.run(
            [str(word) for word in create], env={**os.environ, "PGPASSWORD": password}, stderr=subprocess.DEVNULL
        ).returncode:
            assert time.monotonic() < end, "PostgreSQL does not start"
            time.sleep(0.2)
        yield f"postgresql+asyncpg://{user}:{password}@127.0.0.1:{port}/{database}"
    finally:
        server.terminate()
        server.wait(DEADLINE)
        shutil.rmtree(home, ignore_errors=True)


def _as_postgres(command: list[object]) -> list[str]:
    return ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", *map(str, command)]
