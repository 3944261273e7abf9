"""A job of several ranks: who starts them, and what those do that are not rank 0.

Decision: torchrun's agent runs in the job's own process and starts the ranks as further copies of the job. It ends all
when one dies, and this process then says which one it was. The ranks die with it, as it dies with its runner.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from rollouts_core.stages.specs import DPOSpec, RLSpec, SFTSpec
from rollouts_core.stages.stage import Stage, stage_from_data, stage_to_data

START_SECONDS = 300


def processes_of(stage: Stage) -> int:
    """How many ranks train this stage."""
    return stage.spec.backend.processes if isinstance(stage.spec, SFTSpec | DPOSpec | RLSpec) else 1


def lead(directory: Path, processes: int) -> tuple[int, str]:
    """Run a job's ranks to their end. Gives rank 0's exit status; or, where a rank was killed, -1 and its name."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id=directory.name, rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0", rdzv_timeout=START_SECONDS, max_restarts=0, local_addr="127.0.0.1",
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-m", "rollouts_core.stages.job", str(directory))
        return 0, ""
    except ChildFailedError as error:
        statuses = {rank: failure.exitcode for rank, failure in error.failures.items()}
    killed = {rank: -status for rank, status in statuses.items() if status < 0 and -status != signal.SIGTERM}
    if killed:
        rank = min(killed)
        return -1, f"rank {rank} of {processes} was ended by {signal.Signals(killed[rank]).name}"
    if 0 not in statuses:
        rank = min(statuses)
        return -1, f"rank {rank} of {processes} ended with exit status {statuses[rank]}: its last words are in the log"
    return statuses[0], ""


def tell_build(ranks: Any, stage: Stage, model: Any) -> None:
    """Have the others make the backend that rank 0 is about to make."""
    ranks.tell({"do": "build", "stage": stage_to_data(stage), "model": model.config.to_dict()})


def help_rank_zero(ranks: Any) -> None:
    """What every other rank does, until rank 0 is done."""
    from rollouts_core.training.fsdp import serve

    message = ranks.hear()
    while message["do"] == "build":
        message = serve(ranks, _built(ranks, stage_from_data(message["stage"]), message["model"]))


def _built(ranks: Any, stage: Stage, described: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    from rollouts_core.stages import dpo, rl, sft
    from rollouts_core.training.models import DTYPES

    config = AutoConfig.for_model(described.pop("model_type"), **described)
    if isinstance(stage.spec, SFTSpec):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[stage.spec.model.dtype]).to(ranks.device)
        return sft.backend_for(model, stage.spec, ranks)
    assert isinstance(stage.spec, DPOSpec | RLSpec), "nothing else trains"
    model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[stage.spec.dtype]).to(ranks.device)
    if isinstance(stage.spec, DPOSpec):
        return dpo.backend_for(model, stage.spec, ranks)
    return rl.backend_for(model, stage.spec, rl.recipe_for(stage), ranks)
