"""A job of several ranks: how they are started, and the work of those that are not rank 0.

Decision: torchrun's agent runs in the job's own process and starts the ranks as further copies of the job. It ends all
when one dies, and this process then says which one it was. The ranks die with it, as it dies with its runner.

Decision: over several machines, each has a job with an agent of its own. Rank 0's machine has the stages, the artifacts
and the partial work; the jobs of the others hold nothing but ranks, and end when the connection to it does.
"""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollouts_core.network import use_interface_towards
from rollouts_core.stages.specs import DPOSpec, RLSpec, SFTSpec
from rollouts_core.stages.stage import Stage, stage_from_data

START_SECONDS = 300
ADDRESS = "ROLLOUTS_GROUP_ADDRESS"
"""The address at which ranks meet, for jobs that start again on other nodes."""
ENDED_BY = "was ended by"
"""Words of torchrun about a rank that a signal ended."""


def processes_of(stage: Stage) -> int:
    """How many ranks train this stage."""
    return stage.spec.backend.processes if isinstance(stage.spec, SFTSpec | DPOSpec | RLSpec) else 1


@dataclass(frozen=True)
class Group:
    """The ranks of one training, and this job's place among its machines."""

    processes: int
    """The number of ranks on all machines together."""
    nodes: int = 1
    node: int = 0
    """This machine's number; rank 0 is on number 0."""
    address: str = "127.0.0.1"
    """Address of machine 0, as the others reach it."""
    port: int = 0
    """The port where they meet; 0: any, for one machine."""


def group_of(spec: Mapping[str, Any], stages: Sequence[Stage]) -> Group:
    """The group in a job's spec; there is one where there are several machines."""
    if "group" in spec:
        return Group(**{**spec["group"], "address": os.environ.get(ADDRESS, spec["group"]["address"])})
    return Group(max(map(processes_of, stages)))


def words_of(directory: Path, rank: int) -> Path:
    """The file where a rank other than 0 writes why it ended."""
    return directory / f"rank-{rank}.failed"


def lead(directory: Path, group: Group) -> tuple[int, str]:
    """Run a job's ranks to their end.

    Gives rank 0's exit status, 0 where it is another job's; another's and its words, where it left some; or, where a
    rank was killed, -1 and its name.
    """
    for left in directory.glob("rank-*.failed"):
        left.unlink()
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    here = group.processes // group.nodes
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // here)))
    if group.nodes > 1:
        use_interface_towards(group.address)
    config = LaunchConfig(
        min_nodes=group.nodes, max_nodes=group.nodes, nproc_per_node=here, run_id="rollouts",
        rdzv_backend="static" if group.nodes > 1 else "c10d", rdzv_configs={"rank": group.node},
        rdzv_endpoint=f"{group.address}:{group.port}", rdzv_timeout=START_SECONDS, max_restarts=0,
        local_addr=group.address if group.node == 0 else None,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # otherwise each start leaves a directory in /tmp
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-m", "rollouts_core.stages.job", str(directory))
        return 0, ""
    except ChildFailedError as error:
        statuses = {rank: failure.exitcode for rank, failure in error.failures.items()}
    for rank, status in statuses.items():
        if status > 0 and words_of(directory, rank).exists():
            return status, f"rank {rank} of {group.processes}: {words_of(directory, rank).read_text()}"
    killed = {rank: -status for rank, status in statuses.items() if status < 0 and -status != signal.SIGTERM}
    if killed:
        rank = min(killed)
        return -1, f"rank {rank} of {group.processes} {ENDED_BY} {signal.Signals(killed[rank]).name}"
    if 0 not in statuses:
        rank = min(statuses)
        how = f"ended with exit status {statuses[rank]}: its last words are in the log"
        return -1, f"rank {rank} of {group.processes} {how}"
    return statuses[0], ""


def help_rank_zero(ranks: Any) -> None:
    """The work of every rank other than 0, until rank 0 is done."""
    from rollouts_core.stages.backends import backend_of, laid_out
    from rollouts_core.training.fsdp import serve
    from rollouts_core.training.origins import Origin
    from rollouts_core.training.pytorch import PyTorchTrainingBackend

    message = ranks.hear()
    while message["do"] == "build":
        origin = Origin(**message["origin"])
        stage = stage_from_data(message["stage"])
        ranks.memories()
        shared = laid_out(ranks, stage)
        own = backend_of(stage, origin.blank(), shared, origin)
        assert isinstance(own, PyTorchTrainingBackend), "rank 0 alone has the other kind"
        message = serve(shared, own)
