"""Runs on a real Slurm cluster whose servers have nodes of their own, in the trainer's Slurm job."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.conftest import Done
from tests.flows.test_remote_run import made, start, variables
from tests.flows.test_slurm_run import Begin, alone, begin, checkpoint, finished, store_of

Rollouts = Callable[..., Done]
__all__ = ["alone", "begin", "start", "variables"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["none", "requeued"])
@pytest.mark.parametrize(
    "nodes", [{}, {"gpus": 0, "options": ["--partition=urgent"]}], ids=["alike", "of another kind"]
)
def test_servers_on_further_nodes_give_the_bits_of_one_machine(
    rollouts: Rollouts,
    begin: Begin,
    config_file: Callable[..., Path],
    cluster: Cluster,
    alone: Path,
    variables: dict[str, str],
    nodes: dict[str, Any],
    fault: str,
) -> None:
    """The trainer on the first node, a server on each of two more, which it reaches through their SSH servers. Nodes of
    another kind are a component of their own, of the same Slurm job."""
    rl = {"steps": 60, "steps_per_segment": 60, "checkpoint_every": 10}
    parts: dict[str, Any] = {"sft": {"steps": 20}, "rl": rl, "results": {"artifacts": ["rl"]}}
    assert rollouts("run", config_file(**parts), "--store", alone, **variables).status == 0
    engine = {"kind": "embedded", "replicas": 2, "machines": {"nodes": 2, **nodes}, "start_minutes": 2.0}
    run = begin(**parts, engine=engine)
    checkpoint(cluster, "rl")
    assert sorted(cluster.jobs("%i %P %D")) == (["1 gpu 3"] if not nodes else ["1+0 gpu 1", "1+1 urgent 2"])
    (live,) = rollouts("runs", "--json", **variables).json()[:1]
    held = rollouts("checksums", live["run_id"], "--json", **variables)
    assert held.status == 0, held.err + held.out
    assert [replica["agrees"] for replica in held.json()] == [True, True]
    if fault == "requeued":
        cluster.run("scontrol", "requeue", "1")
    output = finished(run, cluster)
    assert "2 of 2 servers answer" in output
    assert made(alone, "rl") == made(store_of(cluster), "rl")
    assert "rollouts-servers" not in (cluster.host.directory / ".ssh" / "authorized_keys").read_text()
