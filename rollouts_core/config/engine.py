"""The inference engine."""

from typing import Literal

from pydantic import Field, model_validator

from rollouts_core.config.schema import MOST_DEVICES, Added, Operational, or_raise, part


@part
class EngineMachines:
    """Machines for servers, in the place of the trainer's own: of the inventory, rented, or nodes of the trainer's
    Slurm allocation. Nothing here can change a result."""

    names: Operational[tuple[str, ...]] = Field(
        default=(), description="Names of machines; none: all that fit the fields below, without the trainer's."
    )
    labels: Operational[tuple[str, ...]] = Field(default=(), description="Labels that each machine must have.")
    gpus: Operational[int | None] = Field(
        default=None, ge=0, le=MOST_DEVICES, description="GPUs to lease on each; null: all that it has."
    )
    gpu_memory_gb: Operational[float] = Field(default=0.0, ge=0, description="Memory that each GPU must have.")
    rented: Operational[int] = Field(
        default=0,
        ge=0,
        le=MOST_DEVICES,
        description="Number of machines to rent with SkyPilot, instead of the inventory's.",
    )
    accelerator: Operational[str | None] = Field(
        default=None, description="For rented machines: the GPU, as SkyPilot names it."
    )
    nodes: Operational[int] = Field(
        default=0,
        ge=0,
        le=MOST_DEVICES,
        description="Number of further nodes of the trainer's Slurm allocation, instead of other machines.",
    )
    options: Operational[tuple[str, ...]] = Field(
        default=(),
        description="For nodes: options of sbatch, for example --partition=l40s. With options or gpus, the nodes are a "
        "component of their own (a heterogeneous job).",
    )
    keep_minutes: Operational[float] = Field(
        default=0.0, ge=0, description="How long servers stay after the run, for the next run that wants the same."
    )

    @model_validator(mode="after")
    def _something_is_asked_for(self) -> "EngineMachines":
        problems = []
        if self.rented and (self.names or self.labels or self.gpu_memory_gb):
            problems.append("rented: names, labels and gpu_memory_gb choose machines of the inventory; set accelerator")
        if self.rented and not self.accelerator and self.gpus != 0:
            problems.append("rented: set accelerator, for example H100, or set gpus to 0")
        if self.rented and self.keep_minutes:
            problems.append("keep_minutes: not for rented machines, which are given back when the run ends")
        if self.accelerator and not self.rented:
            problems.append("accelerator: only for rented machines; set rented")
        others = self.names or self.labels or self.gpu_memory_gb or self.rented
        if self.nodes and (others or self.keep_minutes):
            problems.append("nodes: these belong to the trainer's allocation; set only gpus and options beside them")
        if self.options and not self.nodes:
            problems.append("options: these are for sbatch and nodes of the trainer's allocation; set nodes")
        if not (self.nodes or others or self.gpus):
            problems.append("names: give machines, or what they must have: labels, gpus or gpu_memory_gb")
        if len(set(self.names)) < len(self.names):
            problems.append(f"names {', '.join(self.names)}: a machine is named twice")
        return or_raise(self, problems)


@part
class EngineConfig:
    """The inference engine. The embedded engine is torch in the trainer's process; the others are servers beside it."""

    kind: Literal["embedded", "sglang", "vllm"] = Field(
        default="embedded", description="Which engine serves the policy."
    )
    max_running_requests: int = Field(
        default=256, ge=1, description="Requests that are decoded together; further ones wait."
    )
    cache_gib: Operational[float | None] = Field(
        default=None,
        gt=0,
        description="For embedded: memory for keys and values, in GiB; null: a third of the free memory.",
    )
    arguments: tuple[str, ...] = Field(default=(), description="Further command-line arguments of each server.")
    replicas: Operational[int] = Field(
        default=1, ge=1, le=MOST_DEVICES, description="Number of servers; several are behind SGLang's router."
    )
    machines: Operational[EngineMachines | None] = Field(
        default=None, description="Other machines that generate, over SSH; null: the trainer's machine."
    )
    min_replicas: Operational[int] = Field(
        default=1,
        ge=1,
        le=MOST_DEVICES,
        description="Number of servers on other machines that must answer; with fewer, training waits.",
    )
    tensor_parallel: Operational[int] = Field(
        default=1, ge=1, le=MOST_DEVICES, description="GPUs that share one copy of the weights."
    )
    data_parallel: Operational[int] = Field(
        default=1, ge=1, le=MOST_DEVICES, description="Copies of the weights in one server."
    )
    weight_sync: Operational[Literal["disk", "tensor", "broadcast"]] = Field(
        default="disk",
        description="How new weights reach servers: as files in memory, as shared tensors (SGLang), or by a broadcast "
        "(NCCL).",
    )
    replay_experts: Added[bool] = Field(
        default=False, description="For mixtures: train each token through the experts that the engine chose for it."
    )
    python: Operational[str | None] = Field(
        default=None,
        description="A Python interpreter that has the server's package, where the server runs; null: one is built.",
    )
    start_minutes: Operational[float] = Field(default=15.0, gt=0, description="How long a server's start may take.")
    hang_seconds: Operational[float] = Field(
        default=30.0, gt=0, description="A server that does not answer for this long is started again."
    )

    @model_validator(mode="after")
    def _servers_are_asked_for(self) -> "EngineConfig":
        problems = []
        if self.kind == "embedded":
            alone = (
                ("tensor_parallel", "data_parallel")
                if self.machines
                else ("replicas", "tensor_parallel", "data_parallel")
            )
            set_anyway = [name for name in alone if getattr(self, name) != 1]
            set_anyway += ["arguments"] if self.arguments else []
            problems += [f"{name}: only for servers, and the engine is embedded" for name in set_anyway]
        elif self.cache_gib is not None:
            problems.append(f"cache_gib: only for the embedded engine, and the engine is {self.kind}")
        if self.kind == "vllm" and self.weight_sync != "disk":
            problems.append(f"weight_sync {self.weight_sync} is SGLang's; vllm takes weights from disk")
        if self.kind == "vllm" and self.replay_experts:
            problems.append("replay_experts needs sglang or embedded: mixtures can't be trained with vllm")
        if self.machines and self.weight_sync == "tensor":
            problems.append("weight_sync tensor needs servers on the trainer's machine; for other machines use disk")
        if self.machines and self.kind == "embedded" and self.replay_experts:
            problems.append("replay_experts on other machines needs sglang")
        if self.min_replicas > self.replicas:
            problems.append(f"min_replicas {self.min_replicas} is more than replicas {self.replicas}")
        if self.min_replicas > 1 and not self.machines:
            problems.append("min_replicas: only for servers on other machines; set machines")
        return or_raise(self, problems)

    @property
    def has_servers(self) -> bool:
        """Whether what generates is servers, and not the trainer's process."""
        return self.kind != "embedded" or self.machines is not None
