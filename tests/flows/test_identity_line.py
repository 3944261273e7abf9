"""Every field of the config, changed one by one: it changes a stage's key exactly when its type says so."""

import copy
import hashlib
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen3MoeConfig

from rollouts_core import config as config_module
from rollouts_core.config import algorithms
from rollouts_core.config.loading import from_data
from rollouts_core.config.schema import identity_fields
from rollouts_core.stages.plan import plan

PLACES = {
    "PipelineConfig": "", "ScratchModel": "model", "PretrainedModel": "model", "DataConfig": "data",
    "Jsonl": "data.prompts", "HubDataset": "data.heldout", "SFTConfig": "sft", "DPOConfig": "dpo", "RLConfig": "rl",
    "EngineConfig": "engine", "EngineMachines": "engine.machines", "MachineConfig": "machine",
    "EvaluationConfig": "evaluation", "StoreConfig": "store",
    "ResultsConfig": "results", "TrackingConfig": "tracking",
    "RolloutsConfig": "rl.rollouts", "BackendConfig": "backend",
    "LoRAConfig": "backend.lora", "ParallelConfig": "backend.parallel",
    "Parquet": "data.prompts", "Arrow": "data.preferences",
    "Mixture": "data.demonstrations", "Weighted": "data.demonstrations.sources.0",
    "TokenizationConfig": "data.tokenization", "EnvironmentConfig": "environment",
    "Served": "served.0",
    **dict.fromkeys((name for name in vars(algorithms) if hasattr(vars(algorithms)[name], "kind")), "rl.algorithm"),
}  # fmt: skip
"""Where in the config a part stands."""

SOURCES = ("Jsonl", "Parquet", "Arrow", "HubDataset")
DRAWING = ("RLConfig", "EvaluationConfig")
CLIPPED = ("GRPO", "DrGRPO", "DAPO", "GSPO", "ReinforcePlusPlus", "MaxRL", "PPO", "CustomAlgorithm")
CHANGES: dict[str, Any] = {
    "PipelineConfig.name": "other", "PipelineConfig.seed": 5,
    "ScratchModel.architecture": "llama", "ScratchModel.hidden_size": 64, "ScratchModel.layers": 2,
    "ScratchModel.heads": 4, "ScratchModel.kv_heads": 2, "ScratchModel.intermediate_size": 128,
    "ScratchModel.tokenizer": "byte_bpe", "ScratchModel.vocab_size": 300, "ScratchModel.dtype": "bfloat16",
    "PretrainedModel.dtype": "bfloat16", "PretrainedModel.trust_remote_code": True, "PretrainedModel.revision": "v2",
    "DataConfig.max_length": 16, "DataConfig.overlong": "drop", "DataConfig.learnt_roles": ["assistant", "user"],
    "TokenizationConfig.parts": 2, "TokenizationConfig.task_runner": "dask",
    "TokenizationConfig.cluster": "tcp://127.0.0.1:1", "Weighted.weight": 5.0, "HubDataset.streaming": True,
    "HubDataset.config": "other", "HubDataset.split": "train[:5]", "HubDataset.revision": "v2",
    "HubDataset.messages_column": "turns", "HubDataset.answer_column": "solution",
    "SFTConfig.steps": 100, "SFTConfig.batch_size": 4, "SFTConfig.tokens_per_pass": 200, "SFTConfig.optimizer": "muon",
    "SFTConfig.learning_rate": 0.5, "SFTConfig.warmup_steps": 3, "SFTConfig.schedule": "linear",
    "SFTConfig.weight_decay": 0.5, "SFTConfig.max_grad_norm": 0.5, "SFTConfig.log_every": 3,
    "SFTConfig.checkpoint_every": 3,
    "DPOConfig.steps": 100, "DPOConfig.batch_size": 4, "DPOConfig.beta": 0.3, "DPOConfig.tokens_per_pass": 200,
    "DPOConfig.optimizer": "muon", "DPOConfig.learning_rate": 0.5, "DPOConfig.warmup_steps": 3,
    "DPOConfig.schedule": "cosine", "DPOConfig.weight_decay": 0.5, "DPOConfig.max_grad_norm": 0.5,
    "DPOConfig.log_every": 3, "DPOConfig.checkpoint_every": 3,
    "RLConfig.steps": 6, "RLConfig.steps_per_segment": 1, "RLConfig.batch_size": 2,
    "RLConfig.n_samples_per_prompt": 2, "RLConfig.minibatches": 2, "RLConfig.learning_rate": 0.5,
    "RLConfig.warmup_steps": 3, "RLConfig.weight_decay": 0.5, "RLConfig.max_grad_norm": 0.5,
    "RLConfig.temperature": 0.5, "RLConfig.max_new_tokens": 2, "RLConfig.reward": "contains_answer",
    "RLConfig.kl_coef": 0.5, "RLConfig.kl_as": "reward", "RLConfig.kl_estimator": "k2", "RLConfig.entropy_coef": 0.1,
    "RLConfig.tokens_per_pass": 200, "RLConfig.optimizer": "muon", "RLConfig.log_samples": 1,
    "RLConfig.checkpoint_every": 3, "BackendConfig.activation_checkpointing": True,
    "BackendConfig.compile": True, "BackendConfig.processes": 2, "BackendConfig.offload_optimizer": True,
    "BackendConfig.balance_experts": True, "EngineConfig.replay_experts": True,
    "ParallelConfig.context": 2, "ParallelConfig.tensor": 2, "ParallelConfig.expert": 2,
    "LoRAConfig.rank": 4, "LoRAConfig.alpha": 4.0, "LoRAConfig.targets": ["q_proj"],
    "GRPO.normalize_std": False, "GRPO.aggregation": "sequence", "DAPO.overlong_tokens": 2,
    "Distillation.revision": "v2", "CISPO.weight_low": 0.5, "CISPO.weight_high": 2.0,
    "ReinforcePlusPlus.group_baseline": True,
    "PPO.gamma": 0.9, "PPO.lam": 0.5, "PPO.value_coef": 0.5, "PPO.value_clip": 0.5,
    "CustomAlgorithm.aggregation": "sequence", "CustomAlgorithm.function": "rollouts_core.rollout.filters:load_filter",
    **{f"{part}.{end}": 0.1 for part in CLIPPED for end in ("clip_low", "clip_high")},
    "RolloutsConfig.generation": "overlapped", "RolloutsConfig.max_staleness": 2,
    "RolloutsConfig.over_sampling_factor": 1.5, "RolloutsConfig.filters": ["check_any_success"],
    "RolloutsConfig.correction": "mask", "RolloutsConfig.ratio_low": 0.25, "RolloutsConfig.ratio_high": 4.0,
    "RolloutsConfig.max_concurrent_samples": 5, "RolloutsConfig.sample_seconds": 5.0,
    "RolloutsConfig.reward_seconds": 5.0, "RolloutsConfig.batch_seconds": 5.0, "RolloutsConfig.keep_batches": True,
    "EngineConfig.max_running_requests": 5, "EngineConfig.arguments": ["--quantization", "fp8"],
    "EngineConfig.replicas": 2, "EngineConfig.tensor_parallel": 2, "EngineConfig.data_parallel": 2,
    "EngineConfig.weight_sync": "tensor", "EngineConfig.python": "/usr/bin/python3",
    "EngineConfig.min_replicas": 2, "EngineMachines.names": ["gpu3"], "EngineMachines.labels": ["h100"],
    "EngineMachines.gpus": 2, "EngineMachines.gpu_memory_gb": 80.0, "EngineMachines.rented": 2,
    "EngineMachines.accelerator": "H100", "EngineMachines.nodes": 1, "EngineMachines.keep_minutes": 30.0,
    "EngineMachines.options": ["--partition=l40s"], "TokenizationConfig.at_once": 2,
    "EngineConfig.start_minutes": 5.0, "EngineConfig.cache_gib": 1.5, "EngineConfig.hang_seconds": 5.0,
    "MachineConfig.device": "cpu", "MachineConfig.time_limit_hours": 5.0, "MachineConfig.unattended_limit_hours": 5.0,
    "MachineConfig.name": "gpu1", "MachineConfig.gpus": 4, "MachineConfig.gpu_memory_gb": 80.0,
    "MachineConfig.labels": ["h100"], "MachineConfig.accelerator": "H100", "MachineConfig.environment": ["HF_TOKEN"],
    "MachineConfig.wait_hours": 5.0, "MachineConfig.peers": ["gpu2"], "MachineConfig.nodes": 2,
    "MachineConfig.unreachable_limit_hours": 5.0,
    "ResultsConfig.policy": False, "ResultsConfig.hub": "me/mine", "ResultsConfig.artifacts": ["rl"],
    "TrackingConfig.tensorboard": True, "TrackingConfig.wandb": "a-project", "TrackingConfig.wandb_mode": "online",
    **{f"{part}.layout": "math" for part in SOURCES}, **{f"{part}.annotations": False for part in SOURCES},
    **{f"{part}.columns": {"messages": "dialog"} for part in SOURCES},
    "RLConfig.reward_failure": "zero", "EnvironmentConfig.name": "guess_number", "EnvironmentConfig.max_turns": 3,
    "EnvironmentConfig.tool_seconds": 3.0, "EvaluationConfig.samples_per_prompt": 3,
    "EvaluationConfig.temperature": 0.5, "EvaluationConfig.pass_at": [1], "EvaluationConfig.slices": ["level"],
    "EvaluationConfig.failures_allowed": 0.5, "EvaluationConfig.during_rl": True,
    "EvaluationConfig.reward_seconds": 5.0, "EvaluationConfig.engine": {"max_running_requests": 3},
    **{f"{part}.top_p": 0.9 for part in DRAWING}, **{f"{part}.top_k": 20 for part in DRAWING},
    **{f"{part}.min_p": 0.1 for part in DRAWING}, **{f"{part}.stop": ["="] for part in DRAWING},
    "Served.name": "other", "Served.task": "score", "Served.max_length": 9, "Served.asked_by": ["rl"],
    "EvaluationConfig.limit": 3, "EvaluationConfig.max_new_tokens": 2, "EvaluationConfig.reward": "contains_answer",
    "StoreConfig.path": "/tmp/elsewhere", "StoreConfig.url": "memory://elsewhere", "StoreConfig.outputs": "/tmp/out",
}  # fmt: skip

COPIED = (
    *(f"{part}.{field}" for part in ("Jsonl", "Parquet", "Arrow") for field in ("path", "sha256")),
    "PretrainedModel.name", "Distillation.teacher", "HubDataset.name", "HubDataset.data_files",
)  # fmt: skip
"""Inputs by their place: changed to a copy elsewhere, they are the same."""
CARRIED = ("RLConfig.steps", "RLConfig.steps_per_segment", "EvaluationConfig.during_rl", "EnvironmentConfig.name")
"""Operational, but they say which stages there are, or name what is in keys by its content."""
EMBEDDED_ONLY = "EngineConfig.cache_gib"
CLUSTERS_ONLY = "MachineConfig.nodes"
NODES_ONLY = ("EngineMachines.nodes", "EngineMachines.options")
ARRAYS_ONLY = "TokenizationConfig.at_once"
ELSEWHERE_ONLY = "EngineConfig.min_replicas"
RENTED_ONLY = ("EngineMachines.rented", "EngineMachines.accelerator")
OF_MIXTURES = ("ParallelConfig.expert", "BackendConfig.balance_experts", "EngineConfig.replay_experts")
NOT_IN_A_SPEC = ("PipelineConfig.name",)


OF_PARTS = ("PipelineConfig.served", "Served.model", "Served.engine")
"""Fields that hold parts which stand elsewhere as well, or several."""


def parts() -> list[Any]:
    return [value for value in vars(config_module).values() if hasattr(value, "__pydantic_fields__")]


def own_fields() -> list[tuple[str, bool]]:
    """Part.field of every field that holds no other part, and whether its type makes it identity."""
    found = []
    for part in parts():
        identity = identity_fields(part)
        for field in fields(part):
            path = ".".join([PLACES[part.__name__], field.name] if PLACES[part.__name__] else [field.name])
            if (
                field.name not in ("kind", "source", "sources")
                and f"{part.__name__}.{field.name}" not in OF_PARTS
                and path not in PLACES.values()
            ):
                found.append((f"{part.__name__}.{field.name}", field.name in identity))
    return found


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    Qwen2Config().save_pretrained(directory)
    save_file({"model.norm.weight": torch.ones(2)}, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixture")
    Qwen3MoeConfig(num_experts=4).save_pretrained(directory)
    save_file({"model.norm.weight": torch.ones(2)}, directory / "model.safetensors")
    return directory


@pytest.fixture
def base(small_config: dict[str, Any], pretrained: Path) -> Callable[[str], dict[str, Any]]:
    def made(part: str) -> dict[str, Any]:
        data = copy.deepcopy(small_config)
        if part == "PretrainedModel":
            data["model"] = {"kind": "pretrained", "name": str(pretrained)}
        if part == "HubDataset":
            file = data["data"]["heldout"]["path"]
            data["data"]["heldout"] = {"kind": "dataset", "name": "json", "data_files": [file]}
        if part == "Parquet":
            data["data"]["prompts"]["kind"] = "parquet"
        if part in ("Mixture", "Weighted"):
            sources = [{"source": data["data"][role]} for role in ("demonstrations", "prompts")]
            data["data"]["demonstrations"] = {"kind": "mixture", "sources": sources}
        if part in ("DPOConfig", "Arrow"):
            data["dpo"] = {}
            data["data"]["preferences"] = data["data"]["prompts"] | {"kind": "arrow"}
        if part == "MachineConfig":
            data["machine"] = {"kind": "ssh", "name": "gpu0", "gpus": 2}
            data["backend"] = {"processes": 2}
        if part == "EngineConfig":
            data["engine"] = {"kind": "sglang"}
        if part == "EngineMachines":
            data["engine"] = {"kind": "sglang", "replicas": 2, "machines": {"names": ["gpu1"]}}
        if PLACES[part] == "rl.algorithm":
            data["rl"]["algorithm"] = {"kind": getattr(algorithms, part).kind}
        if part == "ParallelConfig":
            data["backend"] = {"processes": 2}
            data["model"] |= {"hidden_size": 32, "heads": 4, "kv_heads": 4}
        if part == "LoRAConfig":
            data["backend"] = {"lora": {}}
        if part == "Distillation":
            data["rl"]["algorithm"] = {"kind": "distillation", "teacher": str(pretrained)}
        if part == "Served":
            data["served"] = [{"name": "grader", "model": {"kind": "pretrained", "name": str(pretrained)}}]
        if part == "CustomAlgorithm":
            data["rl"]["algorithm"]["function"] = "rollouts_core.rollout.filters:identify_filter"
        if part == "EnvironmentConfig":
            data["environment"] = {"name": "questions"}
        if part == "EvaluationConfig":
            data["evaluation"]["temperature"] = 1.0
        if part == "RolloutsConfig":
            data["rl"]["rollouts"] = {"generation": "partial", "max_staleness": 1}
        return data

    return made


def keys(data: dict[str, Any]) -> dict[str, str]:
    return {stage.name: stage.key for stage in plan(from_data(data)).stages}


def part_of(data: dict[str, Any], part: str) -> dict[str, Any]:
    found: Any = data
    for step in PLACES[part].split(".") if PLACES[part] else []:
        found = found[int(step)] if step.isdigit() else found.setdefault(step, {})
    part_data: dict[str, Any] = found
    return part_data


def test_every_field_is_listed() -> None:
    assert {name for name, _ in own_fields()} == {*CHANGES, *COPIED}


@pytest.mark.parametrize(("name", "identity"), [entry for entry in own_fields() if entry[0] not in COPIED])
def test_a_field_changes_keys_exactly_when_its_type_says_so(
    base: Callable[[str], dict[str, Any]], mixture: Path, name: str, identity: bool
) -> None:
    part, field = name.split(".")
    data = base(part)
    if name in OF_MIXTURES:
        data["model"] = {"kind": "pretrained", "name": str(mixture)}
    if name == EMBEDDED_ONLY:
        data["engine"] = {"kind": "embedded"}
    if name == ELSEWHERE_ONLY:
        data["engine"] |= {"replicas": 2, "machines": {"names": ["gpu1"]}}
    if name == CLUSTERS_ONLY:
        data["machine"] |= {"kind": "slurm", "name": "cluster"}
    if name == ARRAYS_ONLY:
        data["machine"] = {"kind": "slurm", "name": "cluster"}
        data["data"]["tokenization"] = {"parts": 2, "task_runner": "slurm"}
    if name in NODES_ONLY:
        data["machine"] = {"kind": "slurm", "name": "cluster"}
        data["engine"]["machines"] = {"nodes": 2}
    if name in RENTED_ONLY:
        data["engine"]["machines"] = {"rented": 1, "accelerator": "A100"}
    before = keys(data)
    part_of(data, part)[field] = CHANGES[name]
    changed = keys(data) != before
    assert changed == ((identity or name in CARRIED) and name not in NOT_IN_A_SPEC)


@pytest.mark.parametrize("name", [name for name in COPIED if name != "HubDataset.name"])
def test_an_input_elsewhere_is_the_same_input(base: Callable[[str], dict[str, Any]], name: str, tmp_path: Path) -> None:
    part, field = name.split(".")
    data = base(part)
    before = keys(data)
    holder = part_of(data, part)
    if field == "sha256":
        holder[field] = hashlib.sha256(Path(holder["path"]).read_bytes()).hexdigest()
    elif field == "data_files":
        holder[field] = [str(shutil.copy(file, tmp_path / "copy")) for file in holder[field]]
    else:
        source = Path(holder[field])
        copied = shutil.copytree(source, tmp_path / "copy") if source.is_dir() else shutil.copy(source, tmp_path)
        holder[field] = str(copied)
    assert keys(data) == before
