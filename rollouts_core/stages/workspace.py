"""The arguments of a stage's `run`, and the making of an artifact around it."""

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rollouts_core.memory import begin_peak, peak_bytes
from rollouts_core.metrics.gpus import GPUWatch
from rollouts_core.metrics.loggers import JSONLLogger, keep_steps
from rollouts_core.rollout.glimpse import encode_glimpse
from rollouts_core.stages.stage import Stage, canonical_spec
from rollouts_core.stages.workload import work_of
from rollouts_core.store.fingerprint import code_fingerprint, git_commit, installed_versions
from rollouts_core.store.identity import refuse_changed
from rollouts_core.store.maker import making
from rollouts_core.store.manifest import ArtifactId, Provenance
from rollouts_core.store.store import Store

LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "datasets")
WAIT_FOR_MAKER = 24 * 3600.0
LOCAL_DISK = "ROLLOUTS_LOCAL_DISK"


class StageLog:
    """A stage's metrics, written twice: into its partial work, to be part of the artifact, and for who follows the job.

    Fits `MetricsLogger`.
    """

    def __init__(self, stage: str, kept: Path, followed: JSONLLogger, gpus: GPUWatch | None = None) -> None:
        """With `gpus`, the metrics of each step include how busy these were."""
        self._stage, self._kept, self._followed, self._gpus = stage, kept, followed, gpus
        self._first, self._last = 0, 0

    def covers(self, first: int, last: int, resume_at: int) -> None:
        """Declare the stage's steps, (first, last], for progress; drop what was logged after `resume_at`."""
        self._first, self._last = first, last
        keep_steps(self._kept, resume_at)
        self._logger = JSONLLogger(self._kept)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        metrics = {**metrics, **(self._gpus.metrics() if self._gpus else {})}
        self._logger.log(metrics, step)
        self.progress(step - self._first, self._last - self._first, metrics)

    def rollouts(self, rollouts: Sequence[Mapping[str, Any]], step: int) -> None:
        """Show some of a step's rollouts to who follows."""
        if rollouts:
            self._followed.log({"stage": self._stage, "rollouts": encode_glimpse(rollouts)}, step)

    def progress(self, done: int, total: int, metrics: Mapping[str, float] | None = None) -> None:
        """Tell who follows how far the stage is, with steps counted as in the artifact."""
        place: dict[str, Any] = {"stage": self._stage, "done": done, "total": total}
        self._followed.log({**place, **(metrics or {})}, self._first + done)


@dataclass(frozen=True)
class Session:
    """Things that the stages of a process share. Open it with `with open_session(...) as session`."""

    warm: dict[str, object]
    """Objects that earlier stages kept for later ones, by artifact key."""
    closing: ExitStack
    """Closes what earlier stages left running."""
    servers: Path | None = None
    """The directory of the inference servers beside this process's job."""
    ranks: Any = None
    """The processes that train together, of which this is rank 0; None for one alone."""
    leave: Path | None = None
    """A file that appears when the job is to write a checkpoint and end: its machine is about to be taken back."""

    def is_asked_to_leave(self) -> bool:
        return self.leave is not None and self.leave.exists()


@contextmanager
def open_session(servers: Path | None = None, ranks: Any = None, leave: Path | None = None) -> Iterator[Session]:
    with ExitStack() as closing:
        yield Session({}, closing, servers, ranks, leave)


@dataclass(frozen=True)
class Work:
    """A stage that is about to run."""

    stage: Stage
    inputs: Mapping[str, Path]
    """Role to the input artifact's files."""
    out: Path
    """An empty directory for the stage to fill. It becomes the artifact."""
    scratch: Path
    """Partial work: survives a kill, private to this stage, deleted once the artifact is there."""
    log: StageLog
    device: str
    session: Session
    store: Store

    @property
    def near(self) -> Path:
        """A directory for files that are made of the inputs and read again and again: on the machine's own disk where
        it names one, and else among the partial work. They are made again where they are not there."""
        disk = os.environ.get(LOCAL_DISK)
        if not disk:
            return self.scratch
        place = Path(disk) / self.stage.artifact.directory
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        return place

    def found(self, artifact: ArtifactId) -> Path | None:
        """The files of another artifact, where the store happens to have it."""
        return self.store.open(artifact) if self.store.has(artifact) else None


def make_stage(
    stage: Stage,
    store: Store,
    followed: JSONLLogger,
    device: str,
    session: Session,
    on_lost: Callable[[str], None] = lambda reason: None,
) -> None:
    """Make the stage's artifact unless it is there. Raises what the stage raises; then nothing is published.

    Another maker is waited for, with the reason printed. `on_lost` is called when the right to make it is lost.
    """
    with making(store, stage.artifact, WAIT_FOR_MAKER, partial(print, f"[{stage.name}]", flush=True), on_lost) as place:
        if place is None:
            return
        refuse_changed(stage.external)
        work = Work(
            stage=stage,
            inputs={role: store.open(artifact) for role, artifact in stage.inputs.items()},
            out=place.out,
            scratch=place.scratch,
            log=StageLog(
                stage.name, place.scratch / "metrics.jsonl", followed, None if device == "cpu" else GPUWatch()
            ),
            device=device,
            session=session,
            store=store,
        )
        started, began = datetime.now(UTC), time.perf_counter()
        begin_peak(device)
        summary: dict[str, float] = import_module(stage.module).run(work)
        seconds = time.perf_counter() - began
        used = _used(stage, work)
        refuse_changed(stage.external)
        place.publish(replace(_provenance(stage, started, seconds, summary, device), used=used))


def _used(stage: Stage, work: Work) -> dict[str, float]:
    used = {"peak_memory": float(peak_bytes(work.device))}
    if "data" not in stage.inputs:
        return used
    rows = work.store.manifest(stage.inputs["data"]).provenance.summary
    places = [work.out / "policy", work.inputs.get("policy", work.out) / "policy"]
    places += [Path(external.location) for role, external in stage.external.items() if role == "model"]
    return used | {"work": work_of(stage, rows, places)}


def _provenance(stage: Stage, started: datetime, seconds: float, summary: dict[str, float], device: str) -> Provenance:
    return Provenance(
        version=stage.version,
        spec=canonical_spec(stage),
        inputs={role: artifact.key for role, artifact in stage.inputs.items()},
        external={role: external.identity for role, external in stage.external.items()},
        code=code_fingerprint(stage.module),
        git_commit=git_commit(),
        libraries=installed_versions(LIBRARIES),
        host={
            "platform": platform.platform(),
            "python": platform.python_version(),
            "device": device,
            "cpus": str(os.cpu_count()),
            "node": platform.node(),
        },
        started_at=started.isoformat(timespec="seconds"),
        seconds=round(seconds, 3),
        summary=summary,
        places={role: external.location for role, external in stage.external.items()},
    )
