"""What a plan will take: memory, tokens and time of each stage, before anything is leased.

Decision: memory is counted, part by part, so that a config that doesn't fit can be told which field to change. Time is
not: it is taken from earlier artifacts of the same kind that this machine made, in proportion to the work, and where
there are none, from how fast it multiplies.
"""

import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rollouts_core.config import PipelineConfig
from rollouts_core.memory import GIB
from rollouts_core.stages.plan import Plan
from rollouts_core.stages.sizes import FLOAT32, ModelSize, size_of
from rollouts_core.stages.specs import DPOSpec, EvaluateSpec, RLSpec, SFTSpec, TokenizeSpec
from rollouts_core.stages.stage import Stage
from rollouts_core.stages.workload import mean_length, tokens_of
from rollouts_core.store.manifest import Manifest
from rollouts_core.store.store import Store

CHUNK = 2**26 * FLOAT32
"""Bytes of the logits that exist at once in training (`training.policy`); three such chunks at the peak."""
PREFILL_TOKENS = 16384
"""Of `inference.torch_engine`."""
RUNNING = 256
IMPORTS = "rollouts_core.stages.job, rollouts_core.stages.rl, transformers.models.llama.modeling_llama"
PASS_SHARE = 6
"""A training pass multiplies each weight three times with each token, at two operations each time."""
EFFICIENCY = 0.3
"""Share of plain multiplication's speed that a pass reaches, where nothing is known."""


@dataclass(frozen=True)
class Part:
    name: str
    bytes: int
    field: str = ""
    """Of the config, which makes it smaller."""


@dataclass(frozen=True)
class Estimate:
    stage: str
    cached: bool
    parts: tuple[Part, ...] = ()
    """Of the peak memory of its process; empty where it is not known."""
    tokens: int | None = None
    seconds: float | None = None
    basis: str = ""
    """What the time is taken from, or why there is none."""

    @property
    def peak(self) -> int:
        return sum(part.bytes for part in self.parts)


def estimate(config: PipelineConfig, plan: Plan, store: Store) -> list[Estimate]:
    """Of every stage, in the plan's order."""
    rows = _rows(plan, store)
    try:
        size = size_of(config.model, plan.stages[0].external.get("model"), rows.get("vocab_size"))
    except LookupError as error:
        return [Estimate(s.name, store.has(s.artifact), basis=str(error)) for s in plan.stages]
    base, earlier = _imported_bytes(), store.manifests()
    return [
        replace(_estimate(config, stage, size, rows, base, earlier), cached=store.has(stage.artifact))
        for stage in plan.stages
    ]


def misfit(estimates: Sequence[Estimate], memory: int) -> list[str]:
    """What does not fit `memory` bytes, each with the field that would change most."""
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
    base: int,
    earlier: Sequence[Manifest],
) -> Estimate:
    if isinstance(stage.spec, TokenizeSpec):
        return Estimate(stage.name, cached=False, basis="seconds, mostly")
    tokens = tokens_of(stage, rows, config.data.max_length)
    seconds, basis = _time(stage, size, tokens, earlier)
    parts = (Part("Python, torch and transformers", base), *_parts(config, stage, size, rows))
    return Estimate(stage.name, False, parts, tokens, seconds, basis)


def _parts(config: PipelineConfig, stage: Stage, size: ModelSize, rows: Mapping[str, int]) -> list[Part]:
    """Counted for training on one device in this process."""
    match stage.spec:
        case SFTSpec():
            sequence = mean_length(rows, "demonstrations", config.data.max_length)
            training = stage.spec.training
            a_pass = min(training.tokens_per_pass, training.batch_size * sequence)
            saves = training.steps > training.checkpoint_every
            return _trained(size, "sft", a_pass, a_pass, saves)
        case DPOSpec():
            sequence = 2 * mean_length(rows, "preferences", config.data.max_length)
            training_dpo = stage.spec.training
            a_pass = min(training_dpo.tokens_per_pass, training_dpo.batch_size * sequence)
            saves = training_dpo.steps > training_dpo.checkpoint_every
            return [*_trained(size, "dpo", a_pass, a_pass, saves), Part("the reference", size.weights, "model")]
        case RLSpec():
            rl, prompt = stage.spec.training, mean_length(rows, "prompts", config.data.max_length)
            answers = rl.batch_size * rl.n_samples_per_prompt
            a_pass = min(rl.tokens_per_pass, rl.batch_size * prompt + answers * rl.max_new_tokens)
            learnt = min(a_pass, answers * rl.max_new_tokens)
            saves = stage.spec.stop - stage.spec.start > rl.checkpoint_every
            parts = _trained(size, "rl", a_pass, learnt, saves)
            if config.engine.kind == "embedded":
                rows_at_once = min(answers, config.engine.max_running_requests)
                parts += _engine(size, rows_at_once, prompt + rl.max_new_tokens, "engine.max_running_requests")
            return [*parts, *([Part("the reference", size.weights, "rl.kl_coef")] if rl.kl_coef else [])]
        case EvaluateSpec():
            return _evaluated(stage.spec, size, rows)
    return []


def _trained(size: ModelSize, section: str, a_pass: int, learnt: int, saves: bool) -> list[Part]:
    """Weights, gradients and AdamW's two moments; a bfloat16 model has float32 weights to step in as well.

    A checkpoint holds weights and moments once more while a step is computed.
    """
    master = size.parameters * FLOAT32 if size.bytes_each < FLOAT32 else 0
    copies = [
        Part("weights", size.weights + master, "model"),
        Part("gradients", size.parameters * FLOAT32, "backend.lora"),
        Part("optimizer", 2 * size.parameters * FLOAT32, "backend.lora"),
    ]
    logits = 3 * min(CHUNK, learnt * size.vocabulary * FLOAT32)
    kept = Part("a pass", a_pass * size.per_token * size.bytes_each + logits, f"{section}.tokens_per_pass")
    checkpoint = 3 * size.parameters * FLOAT32 if saves else 0
    return [*copies, kept, Part("a checkpoint", checkpoint, f"{section}.checkpoint_every")]


def _evaluated(spec: EvaluateSpec, size: ModelSize, rows: Mapping[str, int]) -> list[Part]:
    """The embedded engine alone. Its own decoder joins weights, and holds those twice while it does."""
    wanted, prompt = spec.evaluation, mean_length(rows, "heldout", spec.max_length)
    asked = min(RUNNING, (wanted.limit or rows.get("heldout/rows", RUNNING)) * wanted.samples_per_prompt)
    heads = size.query + 2 * size.keys
    widths = 4 * size.hidden + 3 * size.intermediate + 2 * heads
    reading = min(PREFILL_TOKENS, asked * prompt) * widths * size.bytes_each
    logits = asked * size.vocabulary * (3 * FLOAT32 + 2 * 8)  # sampled from in float64
    joined = size.layers * size.hidden * (heads + 2 * size.intermediate) * size.bytes_each
    return [
        *_engine(size, asked, prompt + wanted.max_new_tokens, "evaluation.limit"),
        Part("weights while they are joined", joined),
        Part("reading prompts", max(reading, logits), "evaluation.limit"),
    ]


def _engine(size: ModelSize, rows: int, columns: int, field: str) -> list[Part]:
    """What stays; what a step of generation holds besides is gone when the trainer's pass begins."""
    cache = rows * columns * size.cache_per_token
    return [Part("the engine's weights", size.weights, "engine.kind"), Part("keys and values", cache, field)]


def _time(
    stage: Stage,
    size: ModelSize,
    tokens: int,
    earlier: Sequence[Manifest],
) -> tuple[float | None, str]:
    """Seconds, where they can be known, and what they are taken from: the artifact of this machine with the nearest
    work."""
    if not tokens:
        return None, "not known before tokenization"
    work = tokens * size.weights
    known = [
        (float(entry.provenance.used["work"]), entry)
        for entry in earlier
        if entry.provenance.used.get("work") and entry.artifact.stage.partition("-")[0] == stage.kind
        and entry.provenance.host.get("node") == platform.node()
    ]  # fmt: skip
    if known:
        done, nearest = min(known, key=lambda pair: abs(pair[0] - work))
        return nearest.provenance.seconds * work / done, nearest.artifact.directory
    share = 2 if isinstance(stage.spec, EvaluateSpec) else PASS_SHARE
    flops = tokens * size.parameters * share
    return flops / (EFFICIENCY * _multiplications()), "how fast this machine multiplies: rough"


def _rows(plan: Plan, store: Store) -> dict[str, int]:
    """What tokenization has counted, where that is cached."""
    if not store.has(plan.tokenize.artifact):
        return {}
    return {name: int(n) for name, n in store.manifest(plan.tokenize.artifact).provenance.summary.items()}


def _imported_bytes() -> int:
    """Of a process that has done nothing but import what jobs do."""
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
