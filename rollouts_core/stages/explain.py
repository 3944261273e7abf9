"""Explanations: why a stage will run, or whether its cached artifact was made by other code.

Decision: a stage that is not in the store is compared, field by field, with the artifact of its kind that differs from
it least, apart from the artifacts of its own run. The differences are why it runs: a field of the config, an input, a
file or revision from outside, the stage's version. If one of its inputs will be made by this run, that is the reason. A
stage that is in the store is compared with the code of today: the artifact is used even if the code has changed, and
the explanation says so.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollouts_core.config import MachineConfig
from rollouts_core.config.schema import leaves
from rollouts_core.stages.plan import Plan
from rollouts_core.stages.stage import Kind, Stage, canonical_spec
from rollouts_core.store.elsewhere import machines_seen, seen_on
from rollouts_core.store.fingerprint import changed_code, code_fingerprint
from rollouts_core.store.index import ArtifactIndex, features_of, manifest_of, open_index
from rollouts_core.store.manifest import Manifest
from rollouts_core.store.store import Store

Cause = Literal["field", "input", "external", "version", "first", "follows", "elsewhere"]

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
"""Most changed source files that are named; the JSON of `rollouts plan` names all."""


@dataclass(frozen=True)
class Difference:
    """A difference between a stage and the artifact that it is compared with."""

    cause: Cause
    name: str
    """For a field: its path in the config. For an input or external: its role and where it is."""
    old: Any
    new: Any

    def __str__(self) -> str:
        if self.cause == "first":
            return "no artifact of this kind is in the store"
        if self.cause == "follows":
            return f"follows {self.name}"
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
    """Why a stage will run."""
    changed_code: tuple[str, ...]
    """For a cached stage: source files that have changed since it was made."""
    machine: str = ""
    """For a cached stage that is not here: where it was seen."""

    def lines(self) -> list[str]:
        """Remarks on the state, a line each; often none."""
        if self.state == "to run":
            where = f"  (in {self.nearest})" if self.nearest else ""
            return [f"{told}{where if told.cause != 'follows' else ''}" for told in self.because]
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
    """The explanation of each stage, in order, for a run `on` a machine. Artifacts on that machine count as cached."""
    with open_index(store) as index:
        own = {stage.artifact.key: stage.name for stage in plan.stages}
        here = store.found([stage.artifact for stage in plan.stages])
        to_run: dict[str, str] = {}
        found = []
        for stage in plan.stages:
            told = _cached(stage, here.get(stage.artifact), store, on) or _to_run(stage, store, index, own, to_run)
            to_run |= {stage.artifact.key: stage.name} if told.state == "to run" else {}
            found.append(told)
        return found


def explain_stage(stage: Stage, store: Store, own: Mapping[str, str], made: Mapping[str, str]) -> Explanation:
    """The reasons to run a stage.

    `own`: the names of the run's stages by their keys; `made`: those that this run has made.
    """
    with open_index(store) as index:
        return _to_run(stage, store, index, own, made)


def _cached(stage: Stage, here: Manifest | None, store: Store, on: MachineConfig) -> Explanation | None:
    machine, made = "", here
    if made is None and on.kind != "local" and store.url is None:
        for machine in [on.name] if on.name else machines_seen(store.home):
            if made := seen_on(store.home, machine, stage.artifact):
                break
    if made is None:
        return None
    changed = changed_code(made.provenance.code, code_fingerprint(stage.module))
    return Explanation(stage.name, stage.key, "cached", None, (), changed, machine)


def _to_run(
    stage: Stage, store: Store, index: ArtifactIndex, own: Mapping[str, str], made: Mapping[str, str]
) -> Explanation:
    """The artifacts of its own run are no other ones: a stage that is made from one of those follows it."""
    follows = _followed(stage, made)
    for machine in machines_seen(store.home):
        if seen_on(store.home, machine, stage.artifact):
            left = Difference("elsewhere", machine, None, None)
            return Explanation(stage.name, stage.key, "to run", None, (left,), ())
    features = _features(stage)
    nearest = index.nearest(stage.kind, stage.name, features, own)
    manifest = manifest_of(nearest, store) if nearest else None
    if nearest is None or manifest is None:
        lone: tuple[Difference, ...] = (Difference("first", stage.kind, None, None),)
        if index.nearest(stage.kind, stage.name, features, ()):
            lone = _followed(stage, own)
        return Explanation(stage.name, stage.key, "to run", None, follows or lone, ())
    differences = [*_differences(stage, manifest, index, made)]
    directory = nearest.artifact.directory if differences else None
    return Explanation(stage.name, stage.key, "to run", directory, (*differences, *follows), ())


def _followed(stage: Stage, names: Mapping[str, str]) -> tuple[Difference, ...]:
    """The last of the named artifacts that it is made from."""
    inputs = {artifact.key for artifact in stage.inputs.values()}
    return tuple(Difference("follows", names[key], None, None) for key in names if key in inputs)[-1:]


def _features(stage: Stage) -> dict[str, str]:
    inputs = {role: artifact.key for role, artifact in stage.inputs.items()}
    external = {role: external.identity for role, external in stage.external.items()}
    return features_of(stage.version, canonical_spec(stage), inputs, external)


def _differences(
    stage: Stage, manifest: Manifest, index: ArtifactIndex, made: Mapping[str, str]
) -> Iterator[Difference]:
    """Inputs that the run has `made` are not among them."""
    old_one = manifest.provenance
    if old_one.version != stage.version:
        yield Difference("version", "version", old_one.version, stage.version)
    old, new = dict(leaves(old_one.spec)), dict(leaves(canonical_spec(stage)))
    for path in [*new, *(path for path in old if path not in new)]:
        if old.get(path) != new.get(path):
            yield Difference("field", _config_name(stage.kind, path), old.get(path), new.get(path))
    names = {key: known.artifact.directory for key, known in index.of_keys(old_one.inputs.values()).items()}
    inputs = {role: artifact.key for role, artifact in stage.inputs.items()}
    for role in sorted({*inputs, *old_one.inputs}):
        before, now = old_one.inputs.get(role), inputs.get(role)
        if before != now and now not in made:
            was = names.get(before, before[:16]) if before else "none"
            yield Difference("input", role, was, stage.inputs[role].directory if now else "none")
    outside = {role: external.identity for role, external in stage.external.items()}
    for role in sorted({*outside, *old_one.external}):
        if (was_outside := old_one.external.get(role)) != outside.get(role):
            where = f" ({stage.external[role].location})" if role in outside else ""
            yield Difference("external", f"{role}{where}", _identity(was_outside), _identity(outside.get(role)))


def _config_name(kind: Kind, path: str) -> str:
    for start, name in CONFIG_NAMES[kind].items():
        if path == start or (start.endswith(".") and path.startswith(start)):
            return name + path.removeprefix(start)
    return path


def _identity(identity: Mapping[str, str] | None) -> str | None:
    return None if identity is None else " ".join(f"{name} {value[:24]}" for name, value in sorted(identity.items()))


def _short(value: Any) -> str:
    return "none" if value is None else str(value)
