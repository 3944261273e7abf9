"""The process that makes stages: `python -m rollouts_core.stages.job JOB_DIRECTORY`.

`spec.json` in that directory names the stages, in order, the store and the device. Artifacts that are in the store are
skipped. Stages share the process, so an RL run stays warm from segment to segment. The exit status says whether a retry
can help; `failure.json` has the message.
"""

import ctypes
import errno
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rollouts_core.errors import ArtifactDamaged, AskedToLeave, BadInput, EngineUnavailable, LeaseLost, StoreUnavailable
from rollouts_core.inference.endpoints.served import announce
from rollouts_core.metrics.loggers import JSONLLogger
from rollouts_core.stages.exhausted import is_out_of_memory, message_of_a_rank, out_of_memory_message
from rollouts_core.stages.ranks import group_of, help_rank_zero, lead, words_of
from rollouts_core.stages.stage import Stage, stage_from_data
from rollouts_core.stages.workspace import Session, make_stage, open_session
from rollouts_core.store.store import Store, open_store

EXIT_FAILED = 1
EXIT_BAD_INPUT = 65
EXIT_DISK_FULL = 74
EXIT_TRY_AGAIN = 75
"""Store or servers did not answer, or another process took over: the same job may do better later."""
PR_SET_PDEATHSIG = 1
PULSE_SECONDS = 2.0


def main(directory: Path) -> int:
    """Make the job's stages, alone or as one of several ranks. Returns the exit status.

    A job of ranks for a stage that is made on another machine has no stages of its own.
    """
    _end_with_parent()
    os.environ.setdefault("TQDM_DISABLE", "1")
    spec = json.loads((directory / "spec.json").read_text())
    stages = [stage_from_data(data) for data in spec["stages"]]
    group = group_of(spec, stages)
    if group.processes == 1:
        return _make(directory, spec, stages, None)
    if "RANK" not in os.environ:
        status, told = lead(directory, group)
        name = stages[0].name if stages else "ranks"
        return _fail(directory, name, EXIT_TRY_AGAIN if status < 0 else status, told) if told else status
    from rollouts_core.training.ranks import join_ranks, leave_ranks

    ranks = join_ranks(prepare_torch(spec["device"]))
    status = _help(directory, ranks) if ranks.rank else _make(directory, spec, stages, ranks)
    if status:
        return status
    if not ranks.rank:
        ranks.tell({"do": "end"})
    leave_ranks()
    return 0


def end_process(status: int) -> NoReturn:
    """End this process without the interpreter's own shutdown.

    A thread of gloo may hold a tensor a moment longer than its ranks need it. When it lets go of it while the
    interpreter shuts down, the whole process is aborted (SIGABRT), and a job that made all of its stages is told as
    failed (pytorch/pytorch#179291).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _help(directory: Path, ranks: Any) -> int:
    """The work of a rank other than 0."""
    try:
        help_rank_zero(ranks)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        words_of(directory, ranks.rank).write_text(message_of_a_rank(str(ranks.device), error))
        return EXIT_BAD_INPUT
    return 0


def _make(directory: Path, spec: Mapping[str, Any], stages: Sequence[Stage], ranks: Any) -> int:
    served = {name: directory.parent / f"serve-{chain}" for name, chain in spec.get("served", {}).items()}
    announce(served)
    threading.Thread(target=_keep_pulse, args=(directory / "pulse", list(served.values())), daemon=True).start()
    store = open_store(Path(spec["store"]["home"]), spec["store"]["url"])
    followed = JSONLLogger(directory / "metrics.jsonl")
    with open_session(directory.parent / f"serve-{directory.name}", ranks, directory / "leave") as session:
        for stage in stages:
            if status := _attempt(stage, store, followed, spec["device"], session, directory):
                return status
    return 0


def _attempt(stage: Stage, store: Store, followed: JSONLLogger, device: str, session: Session, directory: Path) -> int:
    try:
        if store.has(stage.artifact):
            return 0
        print(f"making {stage.artifact.directory}", flush=True)
        device = prepare_torch(device) if not stage.kind.startswith("tokenize") else "cpu"
        make_stage(stage, store, followed, device, session, on_lost=partial(_stop, directory, stage))
        return 0
    except (BadInput, ArtifactDamaged) as error:
        return _fail(directory, stage.name, EXIT_BAD_INPUT, str(error))
    except (StoreUnavailable, LeaseLost, EngineUnavailable, AskedToLeave) as error:
        return _fail(directory, stage.name, EXIT_TRY_AGAIN, str(error))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            traceback.print_exc()
            return _fail(directory, stage.name, EXIT_FAILED, f"{type(error).__name__}: {error}")
        message = f"no space left on the disk of {error.filename or store.home}: free some, then run again"
        return _fail(directory, stage.name, EXIT_DISK_FULL, message)
    except Exception as error:
        if is_out_of_memory(error):
            return _fail(directory, stage.name, EXIT_BAD_INPUT, out_of_memory_message(stage, store, device, error))
        if "No space left on device" in str(error):
            message = f"no space left on the disk of {store.home}: free some, then run again"
            return _fail(directory, stage.name, EXIT_DISK_FULL, message)
        traceback.print_exc()
        return _fail(directory, stage.name, EXIT_FAILED, f"{type(error).__name__}: {error}")


def _fail(directory: Path, stage: str, status: int, message: str) -> int:
    """The whole message is for whoever follows the job, who tells it once; the log has its first line."""
    try:
        print(f"[{stage}] failed: {message.splitlines()[0]}", file=sys.stderr, flush=True)
        (directory / "failure.json").write_text(json.dumps({"stage": stage, "message": message}))
    except OSError:
        pass
    return status


def _stop(directory: Path, stage: Stage, reason: str) -> None:
    """End this process at once: nothing that it could still write is wanted."""
    os._exit(_fail(directory, stage.name, EXIT_TRY_AGAIN, reason))


def prepare_torch(device: str) -> str:
    """Deterministic algorithms, results that do not depend on addresses, and the device that 'auto' means here.

    Fresh memory is not filled, as torch would in this mode: nothing here reads it.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("MKL_CBWR", "AUTO")
    import torch

    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if chosen == "cuda" and not torch.cuda.is_available():
        raise BadInput("machine.device is cuda, and torch sees no GPU here: choose cpu or auto")
    torch.use_deterministic_algorithms(True, warn_only=chosen == "cuda")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return chosen


def _keep_pulse(file: Path, served: Sequence[Path]) -> None:
    """Touch the pulse file as long as this process works: its runner ends a process that is paused or stuck. Servers of
    models beside the policy are kept for as long."""
    while True:
        with suppress(OSError):
            file.touch()
        for directory in served:
            with suppress(OSError):
                os.utime(directory / "attended")
        time.sleep(PULSE_SECONDS)


def _end_with_parent() -> None:
    """Die with the runner that watches over this process, however it dies (Linux)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(EXIT_FAILED)


if __name__ == "__main__":
    try:
        status = main(Path(sys.argv[1]))
    except Exception:
        traceback.print_exc()
        status = EXIT_FAILED
    end_process(status)
