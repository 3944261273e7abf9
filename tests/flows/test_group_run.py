"""Training over two hosts: one device's losses, and ranks that die are named and the run goes on."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rollouts_core.metrics.loggers import read_jsonl
from tests.conftest import COMMAND_DEADLINE, Done
from tests.flows.test_ranks import ranks_of
from tests.flows.test_remote_run import start, training_on, until, variables  # noqa: F401
from tests.hosts import HostMachine

Hosts = tuple[HostMachine, HostMachine]
Rollouts = Callable[..., Done]
GROUP = {
    "machine": {"kind": "ssh", "name": "host-a", "peers": ["host-b"], "device": "cpu"},
    "backend": {"processes": 2},
}  # fmt: skip


@pytest.mark.slow
def test_two_hosts_learn_what_one_device_learns(
    rollouts: Rollouts,
    config_file: Callable[..., Path],
    hosts: Hosts,
    variables: dict[str, str],  # noqa: F811
    tmp_path: Path,
) -> None:
    """SFT, then two RL segments, each in turn on both hosts; only the first keeps anything."""
    metrics = []
    for place in ({}, GROUP):
        config = config_file(sft={"steps": 20}, **place)
        done = rollouts("run", config, "--json", "--store", tmp_path / f"store-{len(place)}", **variables)
        assert done.status == 0, done.err
        results = Path(done.json()["report"]).parent
        metrics.append([read_jsonl(results / f"{part}_metrics.jsonl") for part in ("sft", "rl")])
        assert list(load_file(results / "policy" / "model.safetensors"))
    for one, other in zip(*(found[0] for found in metrics), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert [line["step"] for line in metrics[1][1]] == [1, 2, 3, 4]
    assert all(line["sampling/sampling_logp_difference/mean"] < 1e-4 for line in metrics[1][1])
    assert not list((hosts[1].work / "store").glob("artifacts/*"))
    assert not list((hosts[1].work / "store").glob("work/*"))
    assert all(host.idle() for host in hosts)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["rank", "host"])
def test_a_host_whose_ranks_die_is_named_and_the_run_goes_on(
    what: str,
    start: Callable[..., "subprocess.Popen[str]"],  # noqa: F811
    config_file: Callable[..., Path],
    hosts: Hosts,
) -> None:
    run = start("run", config_file(sft={"steps": 150, "log_every": 1}, rl=None, **GROUP))
    job = training_on(hosts[0])
    until(lambda: list((hosts[0].work / "store" / "work").glob("sft-*/checkpoints/step-*")), "a checkpoint")
    if what == "rank":
        (rank,) = ranks_of(hosts[1].work / "store" / "jobs" / f"{job.name}-ranks-1").values()
        os.kill(rank, signal.SIGKILL)
    else:
        hosts[1].reboot()
    output, _ = run.communicate(timeout=COMMAND_DEADLINE)
    assert run.returncode == 0, output
    how = "rank 1 of 2 was ended by SIGKILL" if what == "rank" else "its ranks were killed"
    assert f"host-b: {how}; the group has been ended" in output, output
    assert "resuming after step" in (job / "log").read_text()
    assert all(host.idle() for host in hosts)


@pytest.mark.slow
def test_a_cancelled_run_leaves_nothing_on_either_host(
    start: Callable[..., "subprocess.Popen[str]"],  # noqa: F811
    config_file: Callable[..., Path],
    hosts: Hosts,
) -> None:
    run = start("run", config_file(sft={"steps": 5000, "log_every": 1}, rl=None, **GROUP))
    training_on(hosts[0])
    run.send_signal(signal.SIGINT)
    assert run.wait(COMMAND_DEADLINE) != 0
    assert all(host.idle() for host in hosts)
