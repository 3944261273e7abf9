"""The index of artifacts: it answers questions without reading all manifests.

Decision: the index is updated by names (see `remembered`). So a question costs what was made since the last one, and a
comparison of rows. Whether an artifact is there and complete is never asked here; the store says that.

Decision: each feature of an artifact's identity is stored as one number: a field of its spec, an input, an identity
from outside, its version. So the artifact that differs least from a stage is found by comparing rows of numbers.

Legend: A artifacts of a kind, F features that any of them has.
"""

import json
import sqlite3
import zlib
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rollouts_core.config.schema import leaves
from rollouts_core.errors import StoreError
from rollouts_core.store.elsewhere import machines_seen, manifests_elsewhere, seen_on, stamps_elsewhere
from rollouts_core.store.manifest import ArtifactId, Manifest
from rollouts_core.store.remembered import Row, bring_up_to_date, remembered
from rollouts_core.store.store import Store

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

HERE = "store"
ELSEWHERE = "machine "
"""The prefix of a place that is a machine."""
ABSENT = 0


@dataclass(frozen=True)
class Known:
    """An artifact, by what is remembered of it."""

    artifact: ArtifactId
    machine: str
    """The machine on which it was seen; empty: it is in the store."""
    started_at: str
    seconds: float
    size: int
    """Bytes."""
    node: str
    device: str
    work: float
    """The stage's work, by which later stages are estimated; 0: not known."""
    inputs: Mapping[str, str]
    """Role to key."""


@contextmanager
def open_index(store: Store) -> Iterator["ArtifactIndex"]:
    """Brought up to date with the store, and with what was seen on other machines."""
    with remembered(store.home, partial(_look, store)) as memory:
        yield ArtifactIndex(memory)


class ArtifactIndex:
    def __init__(self, memory: sqlite3.Connection) -> None:
        self._memory = memory
        self._compared: dict[str, _Compared] = {}
        """The features that were compared, by kind."""

    def all(self) -> list[Known]:
        return [_known(row) for row in self._memory.execute(f"SELECT {COLUMNS} FROM artifacts")]

    def worked(self) -> list[Known]:
        """Artifacts in the store whose work is known."""
        rows = self._memory.execute(f"SELECT {COLUMNS} FROM artifacts WHERE place = ? AND work > 0", (HERE,))
        return [_known(row) for row in rows]

    def of_keys(self, keys: Collection[str]) -> dict[str, Known]:
        """The known artifacts of these keys, by key; one in the store rather than elsewhere."""
        asked = list(keys)
        marks = ", ".join("?" * len(asked))
        query = f"SELECT {COLUMNS} FROM artifacts WHERE key IN ({marks}) ORDER BY place = ?"
        found = [_known(row) for row in self._memory.execute(query, (*asked, HERE))]
        return {known.artifact.key: known for known in found}

    def beginning(self, text: str) -> list[ArtifactId]:
        """The store's artifacts whose directory or key begins so."""
        end = text + "\U0010ffff"
        rows = self._memory.execute(
            "SELECT stage, key FROM artifacts WHERE place = ? AND (name BETWEEN ? AND ? OR key BETWEEN ? AND ?) "
            "ORDER BY name",
            (HERE, text, end, text, end),
        )
        return [ArtifactId(stage, key) for stage, key in rows]

    def nearest(self, kind: str, stage: str, features: Mapping[str, str], without: Collection[str]) -> Known | None:
        """Fewest differing features, then the same stage's name, then the latest. `without`: keys that do not count."""
        compared = self._compared.get(kind) or _compared(self._memory, kind)
        self._compared[kind] = compared
        rows = [place for place, row in enumerate(compared.rows) if row[2] not in without]
        if not rows:
            return None
        import numpy as np  # a tenth of a second that most commands need not wait

        wanted_F = np.zeros(compared.features_AF.shape[1], np.uint32)
        for name, value in features.items():
            if name in compared.places:
                wanted_F[compared.places[name]] = _number(value)
        apart_A = (compared.features_AF[rows] != wanted_F).sum(axis=1)
        closest = [compared.rows[rows[place]] for place in np.flatnonzero(apart_A == apart_A.min())]
        chosen = next((row for row in closest if row[3] == stage), closest[0])
        query = f"SELECT {COLUMNS} FROM artifacts WHERE place = ? AND name = ?"
        return _known(self._memory.execute(query, chosen[:2]).fetchone())


@dataclass(frozen=True)
class _Compared:
    """The artifacts of a kind, the latest first."""

    rows: Sequence[tuple[str, str, str, str]]
    """Place, name, key and stage."""
    features_AF: "npt.NDArray[np.uint32]"
    places: Mapping[str, int]
    """Feature to column."""


def _compared(memory: sqlite3.Connection, kind: str) -> _Compared:
    import numpy as np

    found = memory.execute(
        "SELECT place, name, key, stage, features FROM artifacts WHERE kind = ? ORDER BY started_at DESC, place, name",
        (kind,),
    ).fetchall()
    places = _places(memory, kind)
    joined = b"".join(row[4].ljust(4 * len(places), b"\0") for row in found)
    features_AF = np.frombuffer(joined, np.uint32).reshape(len(found), len(places))
    return _Compared([row[:4] for row in found], features_AF, places)


COLUMNS = "place, stage, kind, key, started_at, seconds, size, node, device, work, inputs"


def manifest_of(known: Known, store: Store) -> Manifest | None:
    """The manifest of a known artifact; None if it has been removed since."""
    if known.machine:
        return seen_on(store.home, known.machine, known.artifact)
    try:
        return store.manifest(known.artifact)
    except StoreError:
        return None


def features_of(
    version: int, spec: Mapping[str, Any], inputs: Mapping[str, str], external: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """Name to value of everything that a stage and its key are made of."""
    found = {f"spec.{path}": json.dumps(value) for path, value in leaves(spec)}
    found |= {f"input.{role}": key for role, key in inputs.items()}
    found |= {f"external.{role}": json.dumps(identity, sort_keys=True) for role, identity in external.items()}
    return {**found, "version": str(version)}


def _look(store: Store, memory: sqlite3.Connection) -> None:
    """Bring the index up to date with the store's own artifacts and with those seen on other machines."""
    ((mark,),) = memory.execute("SELECT max(mark) FROM marks WHERE place = ?", (HERE,)).fetchall()
    published = store.published(mark)
    _update(memory, HERE, published.stamps, store.read_manifests, whole=published.whole)
    if published.mark != mark:
        with memory:
            memory.execute("REPLACE INTO marks VALUES (?, ?)", (HERE, published.mark))
    for machine in machines_seen(store.home):
        read = partial(manifests_elsewhere, store.home, machine)
        _update(memory, ELSEWHERE + machine, stamps_elsewhere(store.home, machine), read)


Read = Callable[[Collection[str]], Iterable[tuple[str, Manifest]]]


def _update(memory: sqlite3.Connection, place: str, stamps: Mapping[str, str], read: Read, whole: bool = True) -> None:
    def columns(manifest: Manifest) -> Row:
        artifact, made = manifest.artifact, manifest.provenance
        kind = artifact.stage.partition("-")[0]
        features = features_of(made.version, made.spec, made.inputs, made.external)
        return (
            artifact.stage, kind, artifact.key, made.started_at, made.seconds, sum(e.size for e in manifest.files),
            made.host.get("node", ""), made.host.get("device", ""), made.used.get("work", 0.0), json.dumps(made.inputs),
            _numbers(memory, kind, features),
        )  # fmt: skip

    bring_up_to_date(memory, "artifacts", place, stamps, read, columns, whole=whole)


def _numbers(memory: sqlite3.Connection, kind: str, features: Mapping[str, str]) -> bytes:
    """The features as numbers, each at its feature's place. New features get the next places."""
    places = _places(memory, kind)
    for name in features.keys() - places.keys():
        places[name] = len(places)
        memory.execute("INSERT INTO features VALUES (?, ?, ?)", (kind, name, places[name]))
    numbers = array("I", [ABSENT] * (1 + max(places[name] for name in features)))
    for name, value in features.items():
        numbers[places[name]] = _number(value)
    return numbers.tobytes()


def _number(value: str) -> int:
    """The number of a value (CRC-32). Two values of a feature have the same number once in about 4 billion times."""
    return zlib.crc32(value.encode()) or 1


def _places(memory: sqlite3.Connection, kind: str) -> dict[str, int]:
    return dict(memory.execute("SELECT name, position FROM features WHERE kind = ?", (kind,)))


def _known(row: Sequence[Any]) -> Known:
    place, stage, _, key, started_at, seconds, size, node, device, work, inputs = row
    machine = place.removeprefix(ELSEWHERE) if place != HERE else ""
    return Known(ArtifactId(stage, key), machine, started_at, seconds, size, node, device, work, json.loads(inputs))
