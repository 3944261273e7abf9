"""The config of the places of artifacts, results and metrics."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from rollouts_core.config.schema import Operational, part


@part
class StoreConfig:
    """The places of artifacts and results. No field here can change a result."""

    path: Operational[Path | None] = Field(
        default=None, description="Directory of runs, jobs, unfinished work, and of artifacts unless `url` is set."
    )
    url: Operational[str | None] = Field(
        default=None,
        pattern=r"^[a-z0-9]+://.+",
        description="An fsspec URL for artifacts, for example s3://bucket/prefix; credentials come from the "
        "environment.",
    )
    outputs: Operational[Path | None] = Field(
        default=None, description="Directory for the results of runs; default: outputs."
    )


@part
class TrackingConfig:
    """Other places that metrics are sent to, besides the run's files. No field here can change a result."""

    tensorboard: Operational[bool] = Field(default=False, description="Write outputs/tensorboard/<run>.")
    wandb: Operational[str | None] = Field(default=None, description="A project of Weights & Biases; null: none.")
    wandb_mode: Operational[Literal["offline", "online"]] = Field(
        default="offline", description="offline: writes outputs/wandb for `wandb sync`. online: uses W&B's own key."
    )
