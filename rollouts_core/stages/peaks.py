"""The peak memory of a stage's process in parts, so that the message of a config that doesn't fit says what to change.

The numbers are counted, not measured: everything that is in memory when the largest pass is computed. Answers count
with their longest length.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rollouts_core.config import BackendConfig, DPOConfig, RLConfig, SFTConfig
from rollouts_core.config.training import Optimizer
from rollouts_core.inference.tiles import round_up
from rollouts_core.stages.sizes import FLOAT32, ModelSize
from rollouts_core.stages.specs import DPOSpec, EvaluateSpec, RLSpec, SFTSpec
from rollouts_core.stages.stage import Stage
from rollouts_core.stages.workload import mean_length

CHUNK = 2**26 * FLOAT32
"""Bytes of the logits that exist at once in training (`training.policy`); three such chunks at the peak."""
PREFILL_TOKENS = 16384
"""As in `inference.torch_engine`."""
RUNNING = 256
TOKEN = 1000
"""Bytes that a tokenizer holds of a token: 45 MiB for 49,152 of them."""


@dataclass(frozen=True)
class Part:
    name: str
    bytes: int
    field: str = ""
    """The field of the config that makes it smaller."""


def parts_of(stage: Stage, size: ModelSize, rows: Mapping[str, int], on_gpu: bool = False) -> list[Part]:
    """Parts of the memory of the first rank, which also generates. `rows`: what tokenization has counted. `on_gpu`: of
    the GPU's memory alone."""
    on_host = [] if on_gpu else [Part("the tokenizer", TOKEN * size.vocabulary)]
    return [*on_host, *_of_stage(stage, size, rows, on_gpu)]


def _of_stage(stage: Stage, size: ModelSize, rows: Mapping[str, int], on_gpu: bool) -> list[Part]:
    match stage.spec:
        case SFTSpec(training=training, backend=backend, max_length=longest):
            sequence = mean_length(rows, "demonstrations", longest)
            a_pass = min(training.tokens_per_pass, training.batch_size * sequence)
            return _trained(backend, training, "sft", size, a_pass, a_pass, training.steps, on_gpu)
        case DPOSpec(training=training, backend=backend, max_length=longest):
            sequence = 2 * mean_length(rows, "preferences", longest)
            a_pass = min(training.tokens_per_pass, training.batch_size * sequence)
            parts = _trained(backend, training, "dpo", size, a_pass, a_pass, training.steps, on_gpu)
            return [*parts, Part("the reference", size.weights, "model")]
        case RLSpec(training=rl, backend=backend, engine=engine, max_length=longest):
            prompt = mean_length(rows, "prompts", longest)
            answers = rl.batch_size * rl.n_samples_per_prompt
            a_pass = min(rl.tokens_per_pass, rl.batch_size * prompt + answers * rl.max_new_tokens)
            learnt = min(a_pass, answers * rl.max_new_tokens)
            steps = stage.spec.stop - stage.spec.start
            parts = _trained(backend, rl, "rl", size, a_pass, learnt, steps, on_gpu)
            if not engine.has_servers:
                rows_at_once = min(answers, engine.max_running_requests)
                columns = prompt + rl.max_new_tokens
                parts += _engine(size, rows_at_once, columns, "engine.kind", "engine.max_running_requests")
            return [
                *parts,
                *([Part("the reference", size.weights // backend.processes, "rl.kl_coef")] if rl.kl_coef else []),
            ]
        case EvaluateSpec():
            return _evaluated(stage.spec, size, rows)
    return []


def _trained(
    backend: BackendConfig,
    training: SFTConfig | DPOConfig | RLConfig,
    section: str,
    size: ModelSize,
    a_pass: int,
    learnt: int,
    steps: int,
    on_gpu: bool,
) -> list[Part]:
    """`a_pass`, `learnt`: tokens of the largest pass, and those of them with a log-probability.

    A checkpoint holds what is trained and its moments once more while a step is computed, in the host's memory.
    """
    parts = training_parts(backend, training.optimizer, section, size, a_pass, learnt, on_gpu)
    if on_gpu or steps <= training.checkpoint_every:
        return parts
    trained, moments = _stepped(backend, training.optimizer, size)
    copied = (trained + moments) * FLOAT32 // backend.processes
    return [*parts, Part("a checkpoint", copied, f"{section}.checkpoint_every")]


def training_parts(
    backend: BackendConfig, optimizer: Optimizer, section: str, size: ModelSize, a_pass: int, learnt: int, on_gpu: bool
) -> list[Part]:
    """The memory of one rank while it trains, a step's largest pass included.

    A bfloat16 model has float32 weights to step in as well. Of several ranks, each has float32 shards, and gathers one
    layer, with its gradient, at a time. Ranks that share a pass have their part of its tokens and of each layer; those
    that share experts gather their own alone.
    """
    ranks, tensor, context = backend.processes, backend.parallel.tensor, backend.parallel.context
    trained, moments = _stepped(backend, optimizer, size)
    away = backend.offload_optimizer and on_gpu
    if away:
        weights = size.weights // ranks
    elif ranks > 1:
        held = size.parameters + (trained if backend.lora else 0)
        weights = held * FLOAT32 // ranks
    else:
        masters = trained * FLOAT32 if size.bytes_each < FLOAT32 or backend.lora else 0
        weights = size.weights + masters
    own = size.share(tensor)
    kept = own.per_token(backend.activation_checkpointing, backend.compile, on_gpu)
    logits = 3 * min(CHUNK, learnt // context * own.vocabulary * FLOAT32)
    gathered = size.gathered(tensor, backend.parallel.expert) * (2 * size.bytes_each + FLOAT32)
    return [
        Part("weights", weights, "model"),
        *([Part("a gathered layer", gathered, "backend.parallel")] if ranks > 1 else []),
        Part("gradients", trained * (size.bytes_each if away else FLOAT32) // ranks, "backend.lora"),
        Part("optimizer", 0 if away else moments * FLOAT32 // ranks, "backend.offload_optimizer"),
        Part("a pass", a_pass // context * kept * size.bytes_each + logits, f"{section}.tokens_per_pass"),
    ]


def _stepped(backend: BackendConfig, optimizer: Optimizer, size: ModelSize) -> tuple[int, int]:
    """How many parameters are trained, and how many numbers the optimizer keeps of them."""
    lora = backend.lora
    trained = size.parameters if lora is None else size.adapters(lora.rank, lora.targets)
    inside = trained if lora else size.in_layers
    return trained, trained * 2 - (inside if optimizer == "muon" else 0)


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
        *_engine(size, asked, prompt + wanted.max_new_tokens, "model", "evaluation.limit"),
        Part("weights while they are joined", joined),
        Part("reading prompts", max(reading, logits), "evaluation.limit"),
    ]


def _engine(size: ModelSize, rows: int, columns: int, kind: str, most: str) -> list[Part]:
    """The engine's lasting memory; what a step of generation uses besides is free when the trainer's pass begins.

    `kind` and `most` are the fields that say which engine it is and how much it generates at once.
    """
    cache = rows * round_up(columns) * size.cache_per_token
    return [Part("the engine's weights", size.weights, kind), Part("keys and values", cache, most)]
