"""The whole config, and the checks that concern several of its parts."""

from pydantic import Field, model_validator

from rollouts_core.config.algorithms import Distillation
from rollouts_core.config.data import DataConfig
from rollouts_core.config.engine import EngineConfig
from rollouts_core.config.evaluation import EvaluationConfig
from rollouts_core.config.machine import MachineConfig, ResultsConfig
from rollouts_core.config.model import Model, ScratchModel
from rollouts_core.config.placement import left_by_served, placement_of
from rollouts_core.config.rl import EnvironmentConfig, RLConfig
from rollouts_core.config.sampling import truncations
from rollouts_core.config.schema import or_raise, part
from rollouts_core.config.served import SCHEME, Served
from rollouts_core.config.store import StoreConfig, TrackingConfig
from rollouts_core.config.training import BackendConfig, DPOConfig, SFTConfig


@part
class PipelineConfig:
    """The config of one experiment. Set `sft`, `dpo` or `rl` to null to leave that stage out."""

    name: str = Field(
        default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=60, description="Names the runs."
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="All random draws follow from this number.")
    model: Model = Field(description="The policy before training.")
    data: DataConfig = Field(description="Demonstrations, prompts and held-out prompts.")
    sft: SFTConfig | None = Field(default_factory=SFTConfig, description="Supervised fine-tuning; null to leave out.")
    dpo: DPOConfig | None = Field(default=None, description="Direct preference optimization; null to leave out.")
    rl: RLConfig | None = Field(default_factory=RLConfig, description="Reinforcement learning; null to leave out.")
    environment: EnvironmentConfig | None = Field(
        default=None, description="The environment of episodes; null: each prompt gets one answer."
    )
    backend: BackendConfig = Field(default_factory=BackendConfig, description="How training uses its devices.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="The inference engine.")
    served: tuple[Served, ...] = Field(
        default=(), description="Judges, teachers and reward models that the run starts servers for."
    )
    machine: MachineConfig = Field(default_factory=MachineConfig, description="Where heavy stages run.")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="How accuracy is measured.")
    store: StoreConfig = Field(default_factory=StoreConfig, description="Where artifacts and results live.")
    results: ResultsConfig = Field(
        default_factory=ResultsConfig, description="What is copied back from other machines."
    )
    tracking: TrackingConfig = Field(
        default_factory=TrackingConfig, description="Other places that metrics are sent to."
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> "PipelineConfig":
        return or_raise(
            self,
            _chain_problems(self)
            + _tokenization_problems(self)
            + _served_problems(self)
            + _length_problems(self)
            + _placement_problems(self),
        )


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
    if untrained and config.results.hub:
        problems.append("results.hub: sft, dpo and rl are all null: there is no policy to push")
    if config.sft is None and isinstance(config.model, ScratchModel):
        problems.append("model.kind: a model from scratch needs sft first; give a pretrained one")
    if isinstance(config.model, ScratchModel):
        problems += config.backend.parallel.problems_with(config.model.heads, config.model.kv_heads, experts=0)
        if config.backend.balance_experts:
            problems.append("backend.balance_experts: a model from scratch has no experts")
        if config.engine.replay_experts:
            problems.append("engine.replay_experts: a model from scratch has no experts")
    if config.rl is not None and config.engine.kind == "vllm":
        problems += [
            f"rl.{name}: vllm gives log-probabilities over the tokens that are left, the trainer over all of them; "
            "use sglang or embedded"
            for name in truncations(config.rl)
        ]
    return problems


def _served_problems(config: PipelineConfig) -> list[str]:
    names = [served.name for served in config.served]
    problems = [
        f"served: two models have the name {name}" for name in sorted({name for name in names if names.count(name) > 1})
    ]
    algorithm = config.rl.algorithm if config.rl is not None else None
    if isinstance(algorithm, Distillation) and algorithm.teacher.startswith(SCHEME):
        name = algorithm.teacher.removeprefix(SCHEME)
        found = next((served for served in config.served if served.name == name), None)
        if found is None:
            problems.append(
                f"rl.algorithm.teacher: {algorithm.teacher} is not in `served`, which has {names or 'none'}"
            )
        elif found.task != "score" or "rl" not in found.asked_by:
            problems.append(f"rl.algorithm.teacher: served {name} needs task score, and rl in asked_by")
    return problems


def _tokenization_problems(config: PipelineConfig) -> list[str]:
    settings = config.data.tokenization
    if settings.task_runner == "slurm" and config.machine.kind != "slurm":
        return [f"data.tokenization.task_runner: slurm needs machine.kind slurm, and it is {config.machine.kind}"]
    if settings.at_once is not None and settings.task_runner != "slurm":
        return ["data.tokenization.at_once: only for task_runner slurm; otherwise set parts"]
    return []


def _placement_problems(config: PipelineConfig) -> list[str]:
    machine, machines = config.machine, config.machine.nodes + len(config.machine.peers)
    processes, left = divmod(config.backend.processes, machines)
    if left or not processes:
        return [
            f"backend.processes: {config.backend.processes} ranks can't be divided evenly among {machines} machines"
        ]
    engines = [config.engine, *(one.engine for one in config.served)]
    engines += [config.evaluation.engine] if config.evaluation.engine else []
    if machine.kind != "slurm" and any(engine.machines and engine.machines.nodes for engine in engines):
        return [f"engine.machines.nodes: only for machine.kind slurm, and it is {machine.kind}"]
    if machine.kind == "slurm" and any(engine.machines and not engine.machines.nodes for engine in engines):
        return ["engine.machines: with machine.kind slurm, servers run on nodes of the trainer's allocation; set nodes"]
    unknown = machine.gpus is None and machine.kind == "local" and machine.device == "auto"
    if machine.device == "cpu" or unknown:
        return []
    engine = None if config.rl is None or config.engine.machines else config.engine
    try:
        gpus = 1 if machine.gpus is None else machine.gpus
        placement_of(left_by_served(gpus, config.served), processes, engine)
    except ValueError as error:
        return [f"machine.gpus: {error}"]
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
