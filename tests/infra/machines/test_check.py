"""What is looked at before a machine is used."""

from pathlib import Path

from infra.inventory import find_host
from infra.machines.check import check_machine, gpu_use_finding
from infra.machines.finding import Finding
from tests.hosts import HostMachine

Hosts = tuple[HostMachine, HostMachine]
LOGIN = """\
#!/bin/sh
export SESSION=$$
sh -c "$SSH_ORIGINAL_COMMAND"
for p in /proc/[0-9]*; do grep -qz "^SESSION=$$\\$" $p/environ && kill -9 ${p#/proc/}; done 2>/dev/null
"""
"""As systemd does with KillUserProcesses: what a session has started is killed when it ends."""


def test_a_host_that_ends_processes_at_logout_is_told(hosts: Hosts, tmp_path: Path) -> None:
    script = tmp_path / "login"
    script.write_text(LOGIN)
    script.chmod(0o755)
    host = hosts[0]
    assert logout(host).state == "ok"
    config = host.directory / "sshd_config"
    before = config.read_text()
    try:
        config.write_text(f"{before}ForceCommand {script}\n")
        host.stop_sshd()
        host.start_sshd()
        told = logout(host)
    finally:
        config.write_text(before)
        host.stop_sshd()
        host.start_sshd()
    assert told.state == "failed"
    assert "KillUserProcesses=no" in told.advice


def gpu(index: int, memory: float | None) -> dict[str, float | None]:
    return {"index": index, "utilization": 0.97, "memory_used": memory, "power": 301.4, "temperature": None}


def test_how_busy_gpus_are_is_told_and_programs_without_a_lease_too() -> None:
    use = [gpu(0, 60_000.0), gpu(1, 5.0)]
    told = gpu_use_finding(use, [{"gpus": [0]}])
    assert (told.state, told.found) == ("ok", "0: 97% busy, 60,000 MiB, 301 W; 1: 97% busy, 5 MiB, 301 W")
    told = gpu_use_finding(use, [{"gpus": [1]}])
    assert told.state == "warning"
    assert told.advice.startswith("GPU 0 is used by programs that hold no lease")
    assert gpu_use_finding([gpu(0, None)], []).state == "ok"


def logout(host: HostMachine) -> Finding:
    found = check_machine(host.name, find_host(host.name))
    return next(finding for finding in found if finding.what == "logout")
