from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts_core.config import (
    BackendConfig,
    EngineConfig,
    EngineMachines,
    MachineConfig,
    PipelineConfig,
    PretrainedModel,
    Served,
    placement_of,
)
from rollouts_core.config.placement import left_by_served, placement_of_served
from rollouts_core.errors import BadInput

FEW = st.integers(1, 4)


def servers(replicas: int, tensor: int = 1, data: int = 1) -> EngineConfig:
    return EngineConfig(kind="sglang", replicas=replicas, tensor_parallel=tensor, data_parallel=data)


@given(gpus=st.integers(1, 64), ranks=FEW, replicas=FEW, tensor=FEW, data=FEW)
def test_nothing_is_shared_unless_there_are_too_few_gpus_for_both(
    gpus: int, ranks: int, replicas: int, tensor: int, data: int
) -> None:
    needed = replicas * tensor * data
    try:
        placed = placement_of(gpus, ranks, servers(replicas, tensor, data))
    except ValueError:
        assert gpus < max(ranks, needed)
        return
    used = [gpu for server in placed.servers for gpu in server]
    assert len(set(placed.ranks)) == ranks
    assert len(set(used)) == len(used) == needed
    assert {*placed.ranks, *used} <= set(range(gpus))
    assert placed.colocated == (gpus < ranks + needed)
    assert all(server == tuple(range(server[0], server[0] + tensor * data)) for server in placed.servers)


def test_four_ranks_and_two_servers_of_two_on_eight_gpus() -> None:
    placed = placement_of(8, 4, servers(2, 2))
    assert (placed.ranks, placed.servers, placed.colocated) == ((0, 1, 2, 3), ((4, 5), (6, 7)), False)


def test_on_a_machine_without_gpus_nobody_has_any() -> None:
    placed = placement_of(0, 4, servers(2, 2))
    assert (placed.ranks, placed.servers, placed.colocated) == ((), ((), ()), False)


@pytest.mark.parametrize(
    ("machine", "processes", "engine", "problem"),
    [
        (MachineConfig(kind="ssh", name="a"), 2, EngineConfig(), "backend.processes makes 2 ranks"),
        (MachineConfig(device="cuda", gpus=2), 4, EngineConfig(), "backend.processes makes 4 ranks"),
        (MachineConfig(kind="ssh", name="a", gpus=2), 1, servers(2, 2), "engine.replicas makes 2 servers of 2 GPUs"),
    ],
    ids=["nothing said", "this machine", "servers"],
)
def test_what_cant_be_placed_is_refused(
    pipeline_config: PipelineConfig, machine: MachineConfig, processes: int, engine: EngineConfig, problem: str
) -> None:
    with pytest.raises(BadInput, match=problem):
        replace(pipeline_config, machine=machine, backend=BackendConfig(processes=processes), engine=engine)


def test_numbers_that_no_cluster_has_are_refused(pipeline_config: PipelineConfig) -> None:
    """Found by fuzzing: 2^40 ranks on as many GPUs filled the memory."""
    with pytest.raises(BadInput, match="processes: "):
        replace(pipeline_config, machine=MachineConfig(gpus=2**16), backend=BackendConfig(processes=2**40))


def served(name: str, **engine: Any) -> Served:
    return Served(name=name, model=PretrainedModel(name="some/model"), engine=EngineConfig(kind="sglang", **engine))


def test_models_beside_the_policy_have_the_last_gpus() -> None:
    beside = [
        served("judge", replicas=2),
        served("away", machines=EngineMachines(names=("gpu1",))),
        served("teacher", tensor_parallel=2),
    ]
    assert left_by_served(8, beside) == 4
    assert placement_of_served(8, beside, "judge").servers == ((6,), (7,))
    assert placement_of_served(8, beside, "teacher").servers == ((4, 5),)
    assert (left_by_served(0, beside), placement_of_served(0, beside, "judge").servers) == (0, ((), ()))
    with pytest.raises(ValueError, match="judge, teacher \\(served\\) need 4 GPUs for themselves and 4 are leased"):
        left_by_served(4, beside)
