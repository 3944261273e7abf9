"""The config of the machine that runs heavy stages, and of the results that are copied back."""

from typing import Literal

from pydantic import Field, model_validator

from rollouts_core.config.schema import MOST_DEVICES, Operational, or_raise, part


@part
class MachineConfig:
    """The machine that runs heavy stages. No field here can change a result."""

    kind: Operational[Literal["local", "ssh", "slurm", "sky"]] = Field(
        default="local",
        description="This machine, a machine of the inventory (SSH), a Slurm cluster of the inventory, or one rented "
        "with SkyPilot.",
    )
    name: Operational[str | None] = Field(
        default=None, description="Name of a machine in the inventory; null: the first free one that fits."
    )
    peers: Operational[tuple[str, ...]] = Field(
        default=(),
        description="Further machines of the inventory that train together with the named one; all are leased, or "
        "none.",
    )
    nodes: Operational[int] = Field(
        default=1, ge=1, le=MOST_DEVICES, description="Nodes of a Slurm cluster that train together."
    )
    gpus: Operational[int | None] = Field(
        default=None,
        ge=0,
        le=MOST_DEVICES,
        description="GPUs to lease on each node; null: one, if the machine has any.",
    )
    gpu_memory_gb: Operational[float] = Field(default=0.0, ge=0, description="Memory that each GPU must have.")
    labels: Operational[tuple[str, ...]] = Field(default=(), description="Labels that the machine must have.")
    accelerator: Operational[str | None] = Field(
        default=None, pattern=r"^[A-Za-z0-9-]+$", description="GPU to rent, as SkyPilot names it, for example H100."
    )
    device: Operational[Literal["auto", "cpu", "cuda"]] = Field(
        default="auto", description="auto: cuda if there is one."
    )
    environment: Operational[tuple[str, ...]] = Field(
        default=(),
        description="Environment variables that jobs get, for example HF_TOKEN; they are never written to a file.",
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
            problems.append(f"name {self.name!r} needs kind ssh or slurm")
        if self.kind == "slurm" and self.name is None:
            problems.append("name: is required by kind slurm: which cluster of the inventory")
        if self.nodes > 1 and self.kind != "slurm":
            problems.append(f"nodes: {self.nodes} need kind slurm; elsewhere name further machines in peers")
        if self.peers and (self.name is None or self.kind != "ssh"):
            problems.append(f"peers {', '.join(self.peers)}: need kind ssh and the name of the machine they train with")
        if len({self.name, *self.peers}) <= len(self.peers):
            problems.append(f"peers {', '.join(self.peers)}: a machine is named twice")
        if self.kind == "sky" and self.accelerator is None and self.gpus != 0:
            problems.append("accelerator: is required by kind sky, for example H100; or set gpus to 0")
        if self.device == "cuda" and self.gpus == 0 and self.kind != "local":
            problems.append("device is cuda and gpus is 0")
        return or_raise(self, problems)


@part
class ResultsConfig:
    """The results that are copied back from another machine. Metrics, samples and accuracies always are."""

    policy: Operational[bool] = Field(default=True, description="The final policy, to outputs/<run>/policy.")
    artifacts: Operational[tuple[Literal["sft", "dpo", "rl", "evaluate"], ...]] = Field(
        default=(), description="Stages whose whole artifacts are copied into the store here."
    )
    hub: Operational[str | None] = Field(
        default=None,
        pattern=r"^[\w.-]+/[\w.-]+$",
        description="A repository of the Hugging Face hub that the policy is pushed to, for example me/my-policy.",
    )

    @model_validator(mode="after")
    def _policy_is_here(self) -> "ResultsConfig":
        problems = ["hub: needs the policy here; set policy to true"] if self.hub and not self.policy else []
        return or_raise(self, problems)
