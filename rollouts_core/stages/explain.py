"""Why a stage is to be run, or whether what is cached was made by other code.

Decision: a stage that is not in the store is compared, field by field, with the artifact of its kind that differs from
it least. What differs is why it runs: a field of the config, an input, a file or revision from outside, the stage's
version. A stage that is in the store is compared with the code of today: it is used all the same, and said.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollouts_core.config import MachineConfig
from rollouts_core.config.schema import leaves
from rollouts_core.stages.plan import Plan
from rollouts_core.stages.stage import Kind, Stage, canonical_spec
from rollouts_core.store.elsewhere import all_manifests, seen_elsewhere
from rollouts_core.store.fingerprint import code_fingerprint
from rollouts_core.store.manifest import ArtifactId, Manifest
from rollouts_core.store.store import Store

Cause = Literal["field", "input", "external", "version", "first", "elsewhere"]

CONFIG_NAMES: Mapping[Kind, Mapping[str, str]] = {
    "tokenize": {"sources.": "data.", "tokenizer.": "model.tokenizer.", "max_length": "data.max_length"},
    "sft": {"training.": "sft.", "max_length": "data.max_length"},
    "dpo": {"training.": "dpo.", "max_length": "data.max_length", "dtype": "model.dtype"},
    "rl": {
        "training.": "rl.",
        "max_length": "data.max_length",
        "dtype": "model.dtype",
        "start": "segment.start",
        "stop": "segment.stop",
    },
    "evaluate": {"max_length": "data.max_length", "dtype": "model.dtype"},
}
"""How a spec's fields are called in the config."""


NAMED_FILES = 4
"""Of code that has changed; the JSON of `rollouts plan` names all."""


@dataclass(frozen=True)
class Difference:
    """One thing in which a stage differs from the artifact it is compared with."""

    cause: Cause
    name: str
    """Of a field: its path in the config. Of an input or external: its role, with where it lies."""
    old: Any
    new: Any

    def __str__(self) -> str:
        if self.cause == "first":
            return "no artifact of this kind is in the store"
        if self.cause == "elsewhere":
            return f"it is on {self.name}, not here: `--machine {self.name}` finds it"
        if self.cause == "input":
            return f"input {self.name}: {self.old} -> {self.new}"
        label = {"external": "outside input ", "version": "stage "}.get(self.cause, "")
        return f"{label}{self.name}: {_short(self.old)} -> {_short(self.new)}"


@dataclass(frozen=True)
class Explanation:
    stage: str
    key: str
    state: Literal["cached", "to run"]
    nearest: str | None
    """The artifact that a stage to run was compared with."""
    because: tuple[Difference, ...]
    """Of a stage to run."""
    changed_code: tuple[str, ...]
    """Of a cached one: the source files that are not what it was made with."""
    machine: str = ""
    """Of a cached one that is not here: where it was seen."""

    def lines(self) -> list[str]:
        """What is to be said of the state, a line each; often nothing."""
        if self.state == "to run":
            where = f"  (in {self.nearest})" if self.nearest else ""
            return [f"{difference}{where}" for difference in self.because]
        place = [f"on {self.machine}"] if self.machine else []
        if self.changed_code:
            return [
                *place,
                f"its code has changed since: {_some(self.changed_code)}",
                f"`rollouts run --refresh {self.stage}` makes it again",
            ]
        return place


def _some(files: Sequence[str]) -> str:
    more = len(files) - NAMED_FILES
    return ", ".join(files[:NAMED_FILES]) + (f" and {more} more" if more > 0 else "")


def explain(plan: Plan, store: Store, on: MachineConfig) -> list[Explanation]:
    """One explanation per stage, in order, for a run `on` a machine. What lies there counts as cached."""
    manifests = all_manifests(store)
    there = _seen_on(on, store)
    return [explain_stage(stage, store, manifests, there) for stage in plan.stages]


def explain_stage(
    stage: Stage, store: Store, manifests: Sequence[Manifest], there: Mapping[ArtifactId, tuple[str, Manifest]] = {}
) -> Explanation:
    """`there`: what was seen on the machine that the stage is to run on."""
    here = store.manifest(stage.artifact) if store.has(stage.artifact) else None
    if here is not None or stage.artifact in there:
        machine, manifest = ("", here) if here is not None else there[stage.artifact]
        made_with, today = manifest.provenance.code, code_fingerprint(stage.module)
        changed = sorted(path for path in {*made_with, *today} if made_with.get(path) != today.get(path))
        return Explanation(stage.name, stage.key, "cached", None, (), tuple(changed), machine)
    for name, seen in seen_elsewhere(store.home).items():
        if any(manifest.artifact == stage.artifact for manifest in seen):
            left = (Difference("elsewhere", name, None, None),)
            return Explanation(stage.name, stage.key, "to run", None, left, ())
    others = [manifest for manifest in manifests if _kind(manifest) == stage.kind]
    if not others:
        return Explanation(stage.name, stage.key, "to run", None, (Difference("first", stage.kind, None, None),), ())
    compared = [(_differences(stage, manifest, manifests), manifest) for manifest in others]
    because, nearest = min(compared, key=lambda pair: _distance(stage, *pair))
    return Explanation(stage.name, stage.key, "to run", nearest.artifact.directory, tuple(because), ())


def _seen_on(on: MachineConfig, store: Store) -> dict[ArtifactId, tuple[str, Manifest]]:
    if on.kind == "local" or store.url is not None:
        return {}
    seen = seen_elsewhere(store.home)
    machines = [on.name] if on.name else list(seen)
    return {manifest.artifact: (name, manifest) for name in machines for manifest in seen.get(name, [])}


def _distance(stage: Stage, differences: Sequence[Difference], manifest: Manifest) -> tuple[int, bool, str]:
    """Fewest differences, then the same name, then the latest."""
    return len(differences), manifest.artifact.stage != stage.name, _descending(manifest.provenance.started_at)


def _differences(stage: Stage, manifest: Manifest, manifests: Sequence[Manifest]) -> list[Difference]:
    made = manifest.provenance
    found = [Difference("version", "version", made.version, stage.version)] if made.version != stage.version else []
    old, new = dict(leaves(made.spec)), dict(leaves(canonical_spec(stage)))
    for path in [*new, *(path for path in old if path not in new)]:
        if old.get(path) != new.get(path):
            found.append(Difference("field", _config_name(stage.kind, path), old.get(path), new.get(path)))
    names = {other.artifact.key: other.artifact.directory for other in manifests}
    inputs = {role: artifact.key for role, artifact in stage.inputs.items()}
    for role in sorted({*inputs, *made.inputs}):
        if (before := made.inputs.get(role)) != inputs.get(role):
            was = names.get(before, before[:16]) if before else "none"
            now = stage.inputs[role].directory if role in inputs else "none"
            found.append(Difference("input", role, was, now))
    outside = {role: external.identity for role, external in stage.external.items()}
    for role in sorted({*outside, *made.external}):
        if (was_outside := made.external.get(role)) != outside.get(role):
            where = f" ({stage.external[role].location})" if role in outside else ""
            found.append(Difference("external", f"{role}{where}", _identity(was_outside), _identity(outside.get(role))))
    return found


def _config_name(kind: Kind, path: str) -> str:
    for start, name in CONFIG_NAMES[kind].items():
        if path == start or (start.endswith(".") and path.startswith(start)):
            return name + path.removeprefix(start)
    return path


def _kind(manifest: Manifest) -> str:
    return manifest.artifact.stage.partition("-")[0]


def _identity(identity: Mapping[str, str] | None) -> str | None:
    return None if identity is None else " ".join(f"{name} {value[:24]}" for name, value in sorted(identity.items()))


def _short(value: Any) -> str:
    return "none" if value is None else str(value)


def _descending(text: str) -> str:
    return "".join(chr(0x10FFFF - ord(letter)) for letter in text)
