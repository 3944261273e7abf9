"""Estimates of a plan: memory, tokens and time of each stage, before anything is leased.

Decision: memory is counted part by part, so that the message of a config that doesn't fit can name the field to change.
Time is not counted: it is taken from earlier artifacts of the same kind that this machine, or a GPU, made, in
proportion to the work. Without such artifacts, a CPU's time is estimated from its speed of matrix products, and a GPU's
is not known.
"""

import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rollouts_core.config import MachineConfig, PipelineConfig
from rollouts_core.memory import GIB
from rollouts_core.stages.peaks import Part, parts_of
from rollouts_core.stages.plan import Plan
from rollouts_core.stages.sizes import ModelSize, size_of
from rollouts_core.stages.specs import EvaluateSpec, TokenizeSpec
from rollouts_core.stages.stage import Stage
from rollouts_core.stages.workload import tokens_of
from rollouts_core.store.index import Known, open_index
from rollouts_core.store.store import Store

IMPORTS = (
    "rollouts_core.stages.job, rollouts_core.stages.rl, rollouts_core.stages.evaluate, pandas, "
    "transformers.models.llama.modeling_llama, torch; torch.ones(512, 512, requires_grad=True).mm(torch.ones(512, 512))"
    ".sum().backward()"
)
PASS_SHARE = 6
"""A training pass multiplies each weight three times with each token, at two operations each time."""
EFFICIENCY = 0.3
"""Share of plain multiplication's speed that a pass reaches, where nothing is known."""


@dataclass(frozen=True)
class Estimate:
    stage: str
    cached: bool
    parts: tuple[Part, ...] = ()
    """Parts of the peak memory of its process; empty where they are not known."""
    tokens: int | None = None
    seconds: float | None = None
    basis: str = ""
    """The source of the time estimate, or why there is none."""

    @property
    def peak(self) -> int:
        return sum(part.bytes for part in self.parts)


def estimate(config: PipelineConfig, plan: Plan, store: Store) -> list[Estimate]:
    """Estimates of every stage, in the plan's order."""
    rows = _rows(plan, store)
    try:
        size = size_of(config.model, plan.stages[0].external.get("model"), rows.get("vocab_size"))
    except LookupError as error:
        return [Estimate(s.name, store.has(s.artifact), basis=str(error)) for s in plan.stages]
    on_gpu = runs_on_gpu(config.machine)
    base = () if on_gpu else (Part("Python, torch and transformers", _imported_bytes()),)
    with open_index(store) as index:
        earlier = index.worked()
    return [
        replace(_estimate(config, stage, size, rows, base, earlier), cached=store.has(stage.artifact))
        for stage in plan.stages
    ]


def runs_on_gpu(machine: MachineConfig) -> bool:
    """Whether the config says that stages run on a GPU; else they are taken to run on a CPU."""
    if machine.device == "auto":
        return bool(machine.gpus or machine.gpu_memory_gb or machine.accelerator)
    return machine.device == "cuda"


def misfit(estimates: Sequence[Estimate], memory: int) -> list[str]:
    """The stages that don't fit in `memory` bytes, each with the field whose change would help most."""
    problems = []
    for entry in estimates:
        if entry.cached or entry.peak <= memory:
            continue
        largest = max((part for part in entry.parts if part.field), key=lambda part: part.bytes)
        problems.append(
            f"{entry.stage} needs about {entry.peak / GIB:.1f} GiB, and there are {memory / GIB:.1f}: "
            f"{largest.bytes / GIB:.1f} of them are {largest.name}; change {largest.field}"
        )
    return problems


def _estimate(
    config: PipelineConfig,
    stage: Stage,
    size: ModelSize,
    rows: Mapping[str, int],
    base: tuple[Part, ...],
    earlier: Sequence[Known],
) -> Estimate:
    if isinstance(stage.spec, TokenizeSpec):
        return Estimate(stage.name, cached=False, basis="seconds, mostly")
    tokens = tokens_of(stage, rows, config.data.max_length)
    on_gpu = runs_on_gpu(config.machine)
    seconds, basis = _time(stage, size, tokens, earlier, on_gpu)
    return Estimate(stage.name, False, (*base, *parts_of(stage, size, rows, on_gpu)), tokens, seconds, basis)


def _time(
    stage: Stage,
    size: ModelSize,
    tokens: int,
    earlier: Sequence[Known],
    on_gpu: bool,
) -> tuple[float | None, str]:
    """Seconds, where they can be known, and what they are taken from: the artifact of this machine, or of a GPU, with
    the nearest work."""
    if not tokens:
        return None, "not known before tokenization"
    work = tokens * size.weights
    known = [
        entry for entry in earlier
        if entry.artifact.stage.partition("-")[0] == stage.kind
        and (_on_a_gpu(entry) if on_gpu else _made_here(entry))
    ]  # fmt: skip
    if known:
        nearest = min(known, key=lambda entry: abs(entry.work - work))
        return nearest.seconds * work / nearest.work, nearest.artifact.directory
    if on_gpu:
        return None, "no such stage has run on a GPU yet"
    share = 2 if isinstance(stage.spec, EvaluateSpec) else PASS_SHARE
    flops = tokens * size.parameters * share
    return flops / (EFFICIENCY * _multiplications()), "how fast this machine multiplies: rough"


def _on_a_gpu(made: Known) -> bool:
    return made.device.startswith("cuda")


def _made_here(made: Known) -> bool:
    return made.node == platform.node() and not _on_a_gpu(made)


def _rows(plan: Plan, store: Store) -> dict[str, int]:
    """The numbers of rows that tokenization counted; empty if it is not cached."""
    if not store.has(plan.tokenize.artifact):
        return {}
    return {name: int(n) for name, n in store.manifest(plan.tokenize.artifact).provenance.summary.items()}


def _imported_bytes() -> int:
    """Memory of a process that has only imported what jobs import."""
    code = f"import {IMPORTS}\nprint(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')).split()[1])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    return int(done.stdout) * 1024


def _multiplications() -> float:
    """Operations a second of a product of two matrices in float32."""
    import numpy as np

    size = 1024
    one = np.ones((size, size), np.float32)
    one @ one
    began = time.perf_counter()
    one @ one
    return 2 * size**3 / (time.perf_counter() - began)
