"""What a person writes: `PipelineConfig` and its parts.

Each field lives in the part that owns it, with its type, its default and its description; the Prefect form, the
command line's `--set` and the error messages all read them from here. Fields typed `Operational[...]` cannot change a
result and stay out of stage keys (see `schema`).
"""

from rollouts_core.config import algorithms
from rollouts_core.config.algorithms import *  # noqa: F403
from rollouts_core.config.data import (
    Arrow,
    DataConfig,
    DataPath,
    FileOrUrl,
    HubDataset,
    Jsonl,
    Layout,
    Mixture,
    Overlong,
    Parquet,
    Pin,
    Role,
    Source,
    SourceOrMixture,
    TokenizationConfig,
    Weighted,
)
from rollouts_core.config.engine import EngineConfig, EngineMachines
from rollouts_core.config.evaluation import EvaluationConfig
from rollouts_core.config.machine import MachineConfig, ResultsConfig
from rollouts_core.config.model import Dtype, Model, PretrainedModel, ScratchModel
from rollouts_core.config.pipeline import PipelineConfig
from rollouts_core.config.placement import Placement, placement_of
from rollouts_core.config.rl import EnvironmentConfig, RLConfig, RolloutsConfig
from rollouts_core.config.served import Served
from rollouts_core.config.store import StoreConfig, TrackingConfig
from rollouts_core.config.training import (
    SCHEDULES,
    BackendConfig,
    DPOConfig,
    LoRAConfig,
    Optimizer,
    ParallelConfig,
    Schedule,
    SFTConfig,
)

__all__ = [
    "SCHEDULES",
    "Arrow",
    "BackendConfig",
    "DPOConfig",
    "DataConfig",
    "DataPath",
    "Dtype",
    "EngineConfig",
    "EngineMachines",
    "EnvironmentConfig",
    "EvaluationConfig",
    "FileOrUrl",
    "HubDataset",
    "Jsonl",
    "Layout",
    "LoRAConfig",
    "MachineConfig",
    "Mixture",
    "Model",
    "Optimizer",
    "Overlong",
    "ParallelConfig",
    "Parquet",
    "Pin",
    "PipelineConfig",
    "Placement",
    "PretrainedModel",
    "RLConfig",
    "ResultsConfig",
    "Role",
    "RolloutsConfig",
    "SFTConfig",
    "Schedule",
    "ScratchModel",
    "Served",
    "Source",
    "SourceOrMixture",
    "StoreConfig",
    "TokenizationConfig",
    "TrackingConfig",
    "Weighted",
    "placement_of",
]
__all__ += algorithms.__all__
