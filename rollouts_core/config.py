"""What a person writes: `PipelineConfig` and its parts.

Each knob lives in the part that owns it, with its type, its default and its description; the Prefect form, the
command line's `--set` and the error messages all read them from here. Fields typed `Operational[...]` cannot change a
result and stay out of stage keys (see `rollouts_core.parts`).
"""

from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, PlainValidator, model_validator

from rollouts_core.algorithms import GROUP_ALGORITHMS, GRPO, Algorithm, Distillation
from rollouts_core.parts import Operational, one_of, part


def _text(value: object) -> str:
    if not isinstance(value, Path | str) or not str(value).strip():
        raise ValueError("is no path and no URL")
    return str(value)


FileOrUrl = Annotated[Path | str, PlainValidator(_text, json_schema_input_type=str)]
"""Read as text, so that a URL keeps its slashes."""
Overlong = Literal["refuse", "drop", "cut_left", "cut_right"]
Dtype = Literal["float32", "bfloat16"]
Optimizer = Annotated[
    Literal["adamw", "muon"], Field(description="muon: for the matrices inside the layers; AdamW for the rest.")
]
Schedule = Literal["cosine", "linear", "constant", "stable_then_decay"]
SCHEDULES = "Decay to zero after warm-up; stable_then_decay: over the last fifth."
PartT = TypeVar("PartT")


DataPath = Annotated[
    FileOrUrl,
    Field(description="A file or an fsspec URL, identified by its content or its store's checksum, not by this name."),
]
Pin = Annotated[
    Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None,
    Field(description="Pins the content, for URLs whose store tells no checksum."),
]


Layout = Annotated[
    Literal["rows", "gsm8k", "math"],
    Field(description="How rows are laid out: as ours, or as those of GSM8K or MATH."),
]


@part
class Jsonl:
    """Chat rows from a JSONL file: `{"messages": [{"role": ..., "content": ...}, ...], "answer": ...}`."""

    kind: Literal["jsonl"] = "jsonl"
    path: Operational[DataPath]
    layout: Layout = "rows"
    sha256: Operational[Pin] = None


@part
class Parquet:
    """The same rows from a Parquet file."""

    kind: Literal["parquet"] = "parquet"
    path: Operational[DataPath]
    layout: Layout = "rows"
    sha256: Operational[Pin] = None


@part
class Arrow:
    """The same rows from an Arrow IPC file or stream, as `datasets` saves."""

    kind: Literal["arrow"] = "arrow"
    path: Operational[DataPath]
    layout: Layout = "rows"
    sha256: Operational[Pin] = None


@part
class HubDataset:
    """Rows from anything `datasets.load_dataset` loads; its columns must hold messages and, for RL, an answer."""

    kind: Literal["dataset"] = "dataset"
    name: str = Field(description="Repository name, or a builder such as 'json' or 'parquet' together with data_files.")
    config: str | None = Field(default=None, description="Configuration (subset) of the data set.")
    split: str = Field(default="train", description="Split, slices allowed: 'train[:1000]'.")
    revision: Operational[str | None] = Field(default=None, description="Branch, tag or commit; resolved to a commit.")
    data_files: Operational[tuple[str, ...]] = Field(
        default=(), description="Local files, for builders that read files."
    )
    layout: Layout = "rows"
    messages_column: str = Field(default="messages", description="Column with the list of messages.")
    answer_column: str = Field(default="answer", description="Column with the answer that rewards compare with.")
    streaming: Operational[bool] = Field(
        default=False, description="Read while it is downloaded, for what does not fit on the disk."
    )


Source = Annotated[
    Jsonl | Parquet | Arrow | HubDataset, Field(discriminator="kind", title="source", json_schema_extra=one_of)
]


@part
class Weighted:
    """One of the sources of a mixture."""

    source: Source = Field(description="Where its rows come from.")
    weight: float = Field(default=1.0, gt=0, description="How often its rows are taken, beside the other weights.")


@part
class Mixture:
    """Rows from several sources, each as often as its weight says, however many it has; each in its own epochs."""

    kind: Literal["mixture"] = "mixture"
    sources: tuple[Weighted, ...] = Field(min_length=1, description="The sources and their weights.")


SourceOrMixture = Annotated[
    Jsonl | Parquet | Arrow | HubDataset | Mixture,
    Field(discriminator="kind", title="source", json_schema_extra=one_of),
]
Role = Literal["system", "developer", "user", "assistant", "tool"]


@part
class TokenizationConfig:
    """How data is tokenized; nothing here can change a result."""

    parts: Operational[int] = Field(
        default=1, ge=1, description="Tasks that tokenize at once, each a process of its own."
    )
    task_runner: Operational[Literal["threads", "dask", "ray"]] = Field(
        default="threads", description="Where Prefect runs them: threads of the flow here; or a cluster."
    )
    cluster: Operational[str | None] = Field(
        default=None, description="Address of the Dask scheduler or Ray head; null: one is started here."
    )


@part
class DataConfig:
    """What is learnt from, and what is kept apart to measure with."""

    demonstrations: SourceOrMixture | None = Field(default=None, description="Conversations for SFT.")
    preferences: SourceOrMixture | None = Field(
        default=None, description="Prompts with a chosen and a rejected answer, for DPO."
    )
    prompts: SourceOrMixture | None = Field(default=None, description="Prompts, with what the reward needs, for RL.")
    heldout: Source | None = Field(default=None, description="Prompts never trained on; accuracy is measured here.")
    max_length: int = Field(default=1024, ge=2, description="Context: the longest example allowed, in tokens.")
    overlong: Overlong = Field(
        default="refuse", description="Longer demonstrations; prompts and preferences are never cut, but dropped."
    )
    learnt_roles: tuple[Role, ...] = Field(
        default=("assistant",), min_length=1, description="Whose turns of a demonstration are learnt."
    )
    tokenization: TokenizationConfig = Field(default_factory=TokenizationConfig, description="How data is tokenized.")


@part
class ScratchModel:
    """A small decoder, randomly initialised, with a tokenizer made from the training data."""

    kind: Literal["scratch"] = "scratch"
    architecture: Literal["qwen2", "qwen3", "llama"] = Field(default="qwen2", description="Transformers model family.")
    hidden_size: int = Field(default=128, ge=8, description="Width.")
    layers: int = Field(default=2, ge=1, description="Depth.")
    heads: int = Field(default=4, ge=1, description="Attention heads; they divide the width.")
    kv_heads: int = Field(default=4, ge=1, description="Key-value heads; they divide the heads.")
    intermediate_size: int = Field(default=512, ge=8, description="Width of the feed-forward layers.")
    tokenizer: Literal["character", "byte_bpe"] = Field(default="character", description="Made from the training data.")
    vocab_size: int = Field(default=1024, ge=264, description="Size of a byte_bpe vocabulary.")
    dtype: Dtype = Field(default="float32", description="Type of the weights.")

    @model_validator(mode="after")
    def _heads_divide(self) -> "ScratchModel":
        problems = []
        if self.hidden_size % (2 * self.heads):
            problems.append(f"hidden_size {self.hidden_size} is not a multiple of 2 x heads ({2 * self.heads})")
        if self.heads % self.kv_heads:
            problems.append(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        return _or_raise(self, problems)


@part
class PretrainedModel:
    """A model and tokenizer by hub name or local directory, identified by commit or content, not by that name."""

    kind: Literal["pretrained"] = "pretrained"
    name: Operational[str] = Field(min_length=1, description="Hub name, as 'Qwen/Qwen3-0.6B', or a local directory.")
    revision: Operational[str | None] = Field(default=None, description="Branch, tag or commit; resolved to a commit.")
    dtype: Dtype = Field(default="float32", description="Type of the weights; the optimizer steps in float32.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that comes with the model.")


Model = Annotated[ScratchModel | PretrainedModel, Field(discriminator="kind", json_schema_extra=one_of)]


@part
class SFTConfig:
    """Supervised fine-tuning on the demonstrations' assistant spans."""

    steps: int = Field(default=1000, ge=1, description="Optimizer steps.")
    batch_size: int = Field(default=64, ge=1, description="Examples per optimizer step.")
    tokens_per_pass: int = Field(
        default=16384, ge=1, description="Tokens of one forward-backward pass; a step takes as many passes as it needs."
    )
    optimizer: Optimizer = "adamw"
    learning_rate: float = Field(default=2e-5, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up.")
    schedule: Schedule = Field(default="cosine", description=SCHEDULES)
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are clipped to this global norm.")
    log_every: Operational[int] = Field(default=10, ge=1, description="Steps between lines of metrics.")
    checkpoint_every: Operational[int] = Field(default=100, ge=1, description="Steps between checkpoints.")

    @model_validator(mode="after")
    def _steps_add_up(self) -> "SFTConfig":
        return _or_raise(self, _warmup_problems(self.warmup_steps, self.steps))


@part
class DPOConfig:
    """Direct preference optimization, against the policy that it begins with."""

    steps: int = Field(default=500, ge=1, description="Optimizer steps.")
    batch_size: int = Field(default=32, ge=1, description="Preferences per optimizer step.")
    beta: float = Field(default=0.1, gt=0, description="How strongly the policy is held to the one it begins with.")
    tokens_per_pass: int = Field(
        default=16384, ge=1, description="Tokens of one forward-backward pass, shared prompts counted once."
    )
    optimizer: Optimizer = "adamw"
    learning_rate: float = Field(default=1e-6, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up.")
    schedule: Schedule = Field(default="linear", description=SCHEDULES)
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are clipped to this global norm.")
    log_every: Operational[int] = Field(default=10, ge=1, description="Steps between lines of metrics.")
    checkpoint_every: Operational[int] = Field(default=100, ge=1, description="Steps between checkpoints.")

    @model_validator(mode="after")
    def _steps_add_up(self) -> "DPOConfig":
        return _or_raise(self, _warmup_problems(self.warmup_steps, self.steps))


@part
class EnvironmentConfig:
    """What the policy acts in, turn by turn. Rows of prompts and held-out prompts are then whatever it begins with."""

    name: Operational[str] = Field(
        min_length=1, description="Shipped, 'package.module:function' or 'file.py:function' (or a class)."
    )
    max_turns: int = Field(default=8, ge=1, description="Answers of the policy in one episode, at most.")
    tool_seconds: Operational[float] = Field(default=30.0, gt=0, description="Deadline of one call of a tool.")


@part
class RolloutsConfig:
    """How samples for RL are generated, and how far they may be behind the weights that they train."""

    generation: Literal["on_policy", "partial", "overlapped"] = Field(
        default="on_policy",
        description="on_policy: all tokens are of the current weights. partial: answers that are under way when a "
        "batch is whole go on in the next. overlapped: generation never waits for training.",
    )
    max_staleness: int = Field(
        default=0, ge=0, description="Steps by which a sample's oldest token may be behind; older is dropped."
    )
    over_sampling_factor: float = Field(default=1.0, ge=1, description="Groups under way for each one of the batch.")
    filters: tuple[str, ...] = Field(
        default=(),
        description="Which groups are trained on: shipped checks, or 'file.py:function' of a group's samples.",
    )
    correction: Literal["none", "truncate", "mask"] = Field(
        default="none", description="Importance sampling of what older weights, or the engine's kernels, sampled."
    )
    ratio_low: float = Field(default=0.5, ge=0, description="mask: tokens with a smaller ratio count nothing.")
    ratio_high: float = Field(default=2.0, gt=0, description="truncate: the largest ratio. mask: the band's upper end.")
    max_concurrent_samples: Operational[int] = Field(default=1024, ge=1, description="Samples under way at once.")
    sample_seconds: Operational[float] = Field(default=1800.0, gt=0, description="Deadline of one sample.")
    reward_seconds: Operational[float] = Field(default=300.0, gt=0, description="Deadline of scoring one group.")
    batch_seconds: Operational[float] = Field(default=6 * 3600.0, gt=0, description="Deadline of one batch.")
    keep_batches: Operational[bool] = Field(
        default=False, description="Keep every batch as Parquet; `rollouts replay` trains from them."
    )

    @model_validator(mode="after")
    def _staleness_fits(self) -> "RolloutsConfig":
        problems = []
        if self.generation == "on_policy" and self.max_staleness:
            problems.append(f"max_staleness {self.max_staleness} needs generation partial or overlapped")
        if self.generation != "on_policy" and not self.max_staleness:
            problems.append(f"generation {self.generation} needs max_staleness of at least 1")
        if self.ratio_low > 1 or self.ratio_high < 1:
            problems.append(f"the ratios {self.ratio_low} to {self.ratio_high} do not include 1")
        return _or_raise(self, problems)


@part
class RLConfig:
    """Reinforcement learning, on-policy unless `minibatches` or `rollouts` say otherwise."""

    steps: Operational[int] = Field(
        default=100, ge=1, description="Rollout batches in all; segments carry it into keys."
    )
    steps_per_segment: Operational[int] = Field(
        default=50, ge=1, description="Steps per segment artifact; see `steps`."
    )
    batch_size: int = Field(default=32, ge=1, description="Prompts per step.")
    n_samples_per_prompt: int = Field(default=8, ge=1, description="Samples per prompt: the size of a group.")
    algorithm: Algorithm = Field(default_factory=GRPO, description="What advantages and losses are.")
    minibatches: int = Field(default=1, ge=1, description="Optimizer steps per rollout batch; 1 is on-policy.")
    tokens_per_pass: int = Field(
        default=32768, ge=1, description="Tokens of one forward-backward pass, shared prompts counted once."
    )
    optimizer: Optimizer = "adamw"
    learning_rate: float = Field(default=1e-6, gt=0, description="Learning rate after warm-up.")
    warmup_steps: int = Field(default=0, ge=0, description="Optimizer steps of linear warm-up; constant afterwards.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are clipped to this global norm.")
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature.")
    max_new_tokens: int = Field(default=256, ge=1, description="Longest answer, in tokens, over all its turns.")
    reward: str = Field(default="exact_match", description="Shipped, 'package.module:function' or 'file.py:function'.")
    reward_failure: Literal["stop", "drop", "zero"] = Field(
        default="stop",
        description="A reward that raises, hangs or gives no number: end the run, drop the group, or give nothing.",
    )
    kl_coef: float = Field(default=0.0, ge=0, description="Weight of the KL divergence to the policy RL began with.")
    kl_as: Literal["loss", "reward"] = Field(
        default="loss", description="A term of the loss, or k1 taken off each token's reward."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3", description="Of the loss term; k2 has the gradient of the divergence itself."
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus.")
    rollouts: RolloutsConfig = Field(default_factory=RolloutsConfig, description="How samples are generated.")
    log_samples: Operational[int] = Field(
        default=8, ge=0, description="Samples per step, group by group, kept in rollouts.jsonl for the viewer."
    )
    checkpoint_every: Operational[int] = Field(default=25, ge=1, description="Steps between checkpoints in a segment.")

    @model_validator(mode="after")
    def _groups_fit(self) -> "RLConfig":
        problems = []
        if self.batch_size % self.minibatches:
            problems.append(f"batch_size {self.batch_size} is not a multiple of minibatches {self.minibatches}")
        if self.algorithm.kind in GROUP_ALGORITHMS and self.n_samples_per_prompt == 1:
            problems.append(f"n_samples_per_prompt 1: {self.algorithm.kind} compares the answers of a group")
        if self.algorithm.kind == "maxrl" and self.kl_coef and self.kl_as == "reward":
            problems.append("kl_as reward makes rewards negative, and maxrl needs them at 0 or more")
        if isinstance(self.algorithm, Distillation):
            problems += _distillation_problems(self.algorithm, self.kl_coef, self.temperature)
        return _or_raise(self, problems)


def _distillation_problems(algorithm: Distillation, kl_coef: float, temperature: float) -> list[str]:
    problems = []
    if kl_coef:
        problems.append(f"kl_coef {kl_coef}: distillation has its teacher for a reference, and no other")
    if "://" in algorithm.teacher and temperature != 1:
        problems.append(f"temperature {temperature}: a teacher behind an address scores at 1")
    return problems


@part
class LoRAConfig:
    """Low-rank adapters: the weights stay, and small matrices beside the linear layers are trained."""

    rank: int = Field(default=16, ge=1, description="Rank of the adapters.")
    alpha: float = Field(default=32.0, gt=0, description="What they add is scaled by alpha / rank.")
    targets: tuple[str, ...] = Field(
        default=(), description="Names of linear layers, as q_proj; none: all but the head."
    )


@part
class BackendConfig:
    """How training uses its device, or devices."""

    processes: Operational[int] = Field(
        default=1, ge=1, description="Ranks that share the weights (FSDP2), one for each GPU; 1: a single device."
    )
    lora: LoRAConfig | None = Field(default=None, description="Train adapters instead of the weights.")
    activation_checkpointing: Operational[bool] = Field(
        default=False, description="Compute activations again for the gradient: less memory, a third more time."
    )


@part
class EngineConfig:
    """What generates. The embedded engine is torch in the trainer's process; the others are servers beside it."""

    kind: Literal["embedded", "sglang", "vllm"] = Field(
        default="embedded", description="Which engine serves the policy."
    )
    max_running_requests: int = Field(default=256, ge=1, description="Requests decoded together; more wait their turn.")
    arguments: tuple[str, ...] = Field(default=(), description="Further arguments of each server, as it knows them.")
    replicas: Operational[int] = Field(default=1, ge=1, description="Servers; several stand behind SGLang's router.")
    tensor_parallel: Operational[int] = Field(default=1, ge=1, description="GPUs that share one copy of the weights.")
    data_parallel: Operational[int] = Field(default=1, ge=1, description="Copies of the weights in one server.")
    weight_sync: Operational[Literal["disk", "tensor", "broadcast"]] = Field(
        default="disk", description="How new weights reach SGLang: files in memory, shared tensors, or NCCL."
    )
    python: Operational[str | None] = Field(
        default=None, description="An interpreter with the server's package, where it runs; null: one is built."
    )
    start_minutes: Operational[float] = Field(default=15.0, gt=0, description="How long a server's start may take.")
    hang_seconds: Operational[float] = Field(
        default=30.0, gt=0, description="A server that does not answer for this long is started again."
    )

    @model_validator(mode="after")
    def _servers_are_asked_for(self) -> "EngineConfig":
        problems = []
        if self.kind == "embedded":
            set_anyway = [name for name in ("replicas", "tensor_parallel", "data_parallel") if getattr(self, name) != 1]
            set_anyway += ["arguments"] if self.arguments else []
            problems += [f"{name} is of servers, and the engine is embedded" for name in set_anyway]
        if self.kind == "vllm" and self.weight_sync != "disk":
            problems.append(f"weight_sync {self.weight_sync} is SGLang's; vllm takes weights from disk")
        return _or_raise(self, problems)


@part
class MachineConfig:
    """Where heavy stages run. Nothing here can change a result."""

    kind: Operational[Literal["local", "ssh", "sky"]] = Field(
        default="local", description="This machine, one of the inventory over SSH, or a rented one by SkyPilot."
    )
    name: Operational[str | None] = Field(
        default=None, description="A machine of the inventory; null: the first free one that fits."
    )
    peers: Operational[tuple[str, ...]] = Field(
        default=(),
        description="Further machines of the inventory, which train along with the one named; leased all or none.",
    )
    gpus: Operational[int | None] = Field(
        default=None, ge=0, description="GPUs to lease; null: one, where the machine has any."
    )
    gpu_memory_gb: Operational[float] = Field(default=0.0, ge=0, description="Memory that each GPU must have.")
    labels: Operational[tuple[str, ...]] = Field(default=(), description="Labels that the machine must carry.")
    accelerator: Operational[str | None] = Field(
        default=None, pattern=r"^[A-Za-z0-9-]+$", description="GPU model to rent, as SkyPilot calls it: H100."
    )
    device: Operational[Literal["auto", "cpu", "cuda"]] = Field(
        default="auto", description="auto: cuda if there is one."
    )
    environment: Operational[tuple[str, ...]] = Field(
        default=(), description="Environment variables of here that jobs there get, as HF_TOKEN; never written down."
    )
    wait_hours: Operational[float] = Field(default=24.0, gt=0, description="How long to wait for GPUs that are in use.")
    time_limit_hours: Operational[float] = Field(default=24.0, gt=0, description="A job is ended after this time.")
    unattended_limit_hours: Operational[float] = Field(
        default=24.0, gt=0, description="A job is ended when no orchestrator has asked for it for this long."
    )
    unreachable_limit_hours: Operational[float] = Field(
        default=6.0,
        gt=0,
        description="A run gives up when its machine has not answered for this long; its job runs on.",
    )

    @model_validator(mode="after")
    def _machine_is_found(self) -> "MachineConfig":
        problems = []
        if self.kind == "local" and self.name is not None:
            problems.append(f"name {self.name!r} needs kind ssh")
        if self.peers and (self.name is None or self.kind != "ssh"):
            problems.append(f"peers {', '.join(self.peers)}: need kind ssh and the name of the machine they train with")
        if len({self.name, *self.peers}) <= len(self.peers):
            problems.append(f"peers {', '.join(self.peers)}: a machine is named twice")
        if self.kind == "sky" and self.accelerator is None and self.gpus != 0:
            problems.append("accelerator: is required by kind sky, as H100; or set gpus to 0")
        if self.device == "cuda" and self.gpus == 0 and self.kind != "local":
            problems.append("device is cuda and gpus is 0")
        return _or_raise(self, problems)


@part
class ResultsConfig:
    """What comes home from another machine. Metrics, samples and accuracies always do."""

    policy: Operational[bool] = Field(default=True, description="The final policy, to outputs/<run>/policy.")
    artifacts: Operational[tuple[Literal["sft", "dpo", "rl", "evaluate"], ...]] = Field(
        default=(), description="Stages whose artifacts come into the store here, whole."
    )


@part
class EvaluationConfig:
    """Answers to the held-out prompts, scored before training and after SFT, DPO and RL; greedy unless `temperature`
    says otherwise."""

    limit: int | None = Field(default=None, ge=1, description="Only the first so many held-out prompts.")
    max_new_tokens: int = Field(default=256, ge=1, description="Longest answer, in tokens, over all its turns.")
    reward: str = Field(default="exact_match", description="Scores an answer; 1 or more counts as correct.")
    samples_per_prompt: int = Field(default=1, ge=1, description="Answers to each prompt.")
    temperature: float = Field(default=0.0, ge=0, description="Sampling temperature; 0 is greedy.")
    pass_at: tuple[int, ...] = Field(default=(), description="Each k of pass@k, at most samples_per_prompt.")
    slices: tuple[str, ...] = Field(default=(), description="Columns by whose values results are told apart.")
    failures_allowed: float = Field(
        default=0.01, ge=0, le=1, description="Share of answers that may fail, or fail to be scored."
    )
    during_rl: Operational[bool] = Field(
        default=False, description="Also the policy of each RL segment, while the next one is trained."
    )
    reward_seconds: Operational[float] = Field(default=300.0, gt=0, description="Deadline of scoring one prompt.")

    @model_validator(mode="after")
    def _samples_suffice(self) -> "EvaluationConfig":
        problems = [
            f"pass_at {k} is not within 1 to samples_per_prompt {self.samples_per_prompt}"
            for k in self.pass_at
            if not 1 <= k <= self.samples_per_prompt
        ]
        if self.samples_per_prompt > 1 and not self.temperature:
            problems.append(f"samples_per_prompt {self.samples_per_prompt}: greedy answers are all the same")
        return _or_raise(self, problems)


@part
class StoreConfig:
    """Where artifacts and results live. Nothing here can change a result."""

    path: Operational[Path | None] = Field(
        default=None, description="Runs, jobs, partial work, and artifacts unless `url` says otherwise."
    )
    url: Operational[str | None] = Field(
        default=None,
        pattern=r"^[a-z0-9]+://.+",
        description="Artifacts at an fsspec URL, as s3://bucket/prefix; credentials come from the environment.",
    )
    outputs: Operational[Path | None] = Field(default=None, description="What runs bring home; default: outputs.")


@part
class TrackingConfig:
    """Where metrics go besides the run's own files. Nothing here can change a result."""

    tensorboard: Operational[bool] = Field(default=False, description="Write outputs/tensorboard/<run>.")
    wandb: Operational[str | None] = Field(default=None, description="A project of Weights & Biases; null: none.")
    wandb_mode: Operational[Literal["offline", "online"]] = Field(
        default="offline", description="offline: into outputs/wandb, for `wandb sync`; online: the key is its own."
    )


@part
class PipelineConfig:
    """One experiment, whole. `sft`, `dpo` or `rl` set to null leaves that part of the chain out."""

    name: str = Field(
        default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=60, description="Names the runs."
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="Every random draw follows from it.")
    model: Model = Field(description="The policy before training.")
    data: DataConfig = Field(description="Demonstrations, prompts and held-out prompts.")
    sft: SFTConfig | None = Field(default_factory=SFTConfig, description="Supervised fine-tuning; null to leave out.")
    dpo: DPOConfig | None = Field(default=None, description="Direct preference optimization; null to leave out.")
    rl: RLConfig | None = Field(default_factory=RLConfig, description="Reinforcement learning; null to leave out.")
    environment: EnvironmentConfig | None = Field(
        default=None, description="What the policy acts in; null: each prompt has one answer."
    )
    backend: BackendConfig = Field(default_factory=BackendConfig, description="How training uses its device.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="What generates.")
    machine: MachineConfig = Field(default_factory=MachineConfig, description="Where heavy stages run.")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="How accuracy is measured.")
    store: StoreConfig = Field(default_factory=StoreConfig, description="Where artifacts and results live.")
    results: ResultsConfig = Field(default_factory=ResultsConfig, description="What comes home from other machines.")
    tracking: TrackingConfig = Field(default_factory=TrackingConfig, description="Where metrics go besides.")

    @model_validator(mode="after")
    def _parts_fit(self) -> "PipelineConfig":
        return _or_raise(self, _chain_problems(self) + _length_problems(self) + _rank_problems(self))


def _chain_problems(config: PipelineConfig) -> list[str]:
    problems = []
    untrained = config.sft is None and config.dpo is None and config.rl is None
    if untrained and config.data.heldout is None:
        problems.append("sft, dpo and rl are all null, and data.heldout too: there is nothing to do")
    if config.sft is not None and config.data.demonstrations is None:
        problems.append("data.demonstrations: is required by sft")
    if config.dpo is not None and config.data.preferences is None:
        problems.append("data.preferences: is required by dpo")
    if config.rl is not None and config.data.prompts is None:
        problems.append("data.prompts: is required by rl")
    if config.sft is None and isinstance(config.model, ScratchModel):
        problems.append("model.kind: a model from scratch needs sft first; give a pretrained one")
    return problems


def _warmup_problems(warmup_steps: int, steps: int) -> list[str]:
    return [f"warmup_steps {warmup_steps} is not smaller than steps {steps}"] if warmup_steps >= steps else []


def _rank_problems(config: PipelineConfig) -> list[str]:
    machine, machines = config.machine, 1 + len(config.machine.peers)
    processes, left = divmod(config.backend.processes, machines)
    if left or not processes:
        return [f"backend.processes: {config.backend.processes} ranks are not the same number on {machines} machines"]
    if config.backend.processes == 1 or machine.kind == "local" or machine.device == "cpu":
        return []
    if machine.gpus is None or machine.gpus < processes:
        return [f"machine.gpus: backend.processes makes {processes} ranks on each machine; lease as many GPUs"]
    return []


def _length_problems(config: PipelineConfig) -> list[str]:
    limits = {"evaluation.max_new_tokens": config.evaluation.max_new_tokens} if config.data.heldout else {}
    if config.rl is not None:
        limits["rl.max_new_tokens"] = config.rl.max_new_tokens
    return [
        f"{path}: {tokens} leaves no room for a prompt in data.max_length {config.data.max_length}"
        for path, tokens in limits.items()
        if tokens >= config.data.max_length
    ]


def _or_raise(value: PartT, problems: list[str]) -> PartT:
    if problems:
        raise ValueError("\n".join(problems))
    return value
