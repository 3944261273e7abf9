"""A Slurm cluster on one of the hosts: its sshd is the login node, its nodes are slurmd's of their own ports.

Partitions: `gpu` (the default), `short` (one minute at most) and `urgent`, which takes nodes from the others.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.hosts import DEADLINE, PATH, HostMachine

NODES = 3
GPUS = 2
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
WITHOUT_ACCOUNTS = "AccountingStorageType=accounting_storage/none\nPreemptType=preempt/partition_prio"
CONF = """
ClusterName=trial
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=1,defer=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerNode=1000
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool.%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/%n.log
SlurmctldPort=16817
SlurmdParameters=config_overrides
SlurmdTimeout=10
ReturnToService=2
GresTypes=gpu
MpiDefault=none
SwitchType=switch/none
JobCompType=jobcomp/none
{accounting}
KillWait=5
PreemptMode=REQUEUE
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr={address} Port=[16821-{last_port}] CPUs=4 \
RealMemory=8000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=gpu Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1
PartitionName=short Nodes=n[1-{nodes}] MaxTime=1 State=UP OverSubscribe=NO PriorityTier=1
PartitionName=urgent Nodes=n[1-{nodes}] MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=9
"""


@dataclass(frozen=True)
class Cluster:
    """A real slurmctld, slurmd's and munged on the network of a host."""

    host: HostMachine
    blind: bool = False

    @property
    def home(self) -> Path:
        return self.host.directory / "slurm"

    def run(self, *command: str, check: bool = True) -> str:
        """What a command prints that is run on the login node."""
        there = ["nsenter", f"--net=/run/netns/{self.host.namespace}", *command]
        done = subprocess.run(
            there, env=self.environment(), text=True, check=check, timeout=60, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        return done.stdout.strip()

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.home / "slurm.conf")}

    def jobs(self, form: str = "%i") -> list[str]:
        """What squeue says of each job."""
        return self.run("squeue", "-h", "-o", form).splitlines()

    def hurry(self) -> None:
        """Have what was queued again start now, and not in two minutes as Slurm wants it."""
        for job in self.jobs():
            self.run("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)

    def start_controller(self) -> None:
        self.run("slurmctld")

    def stop(self, name: str) -> None:
        """slurmctld, or a node (n1, n2, ...), by kill -9; what runs there runs on."""
        _kill(self.home / f"{name}.pid")

    def lose_node(self, name: str) -> None:
        """It is gone with all that runs there, and Slurm has noticed."""
        self.stop(name)
        mark = f"SLURMD_NODENAME={name}\0".encode()
        for pid in self.host.processes():
            with suppress(OSError):
                stepd = f"slurmstepd-{name}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
                if stepd or mark in Path(f"/proc/{pid}/environ").read_bytes():
                    os.kill(pid, 9)
        self.run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=lost")

    def start_node(self, name: str) -> None:
        """One that is `blind` has an empty disk of its own in the place of the login node's work directory."""
        work = self.host.work
        hide = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs tmpfs {work} && exec slurmd -N {name}"]
        self.run(*(hide if self.blind else ["slurmd", "-N", name]))

    def start_munge(self) -> None:
        home = self.home
        self.run(
            "munged", "--force", f"--socket={home}/munge.socket", f"--key-file={home}/munge.key",
            f"--pid-file={home}/munged.pid", f"--log-file={home}/munged.log", f"--seed-file={home}/munge.seed",
        )  # fmt: skip


@contextmanager
def running_cluster(
    host: HostMachine,
    accounting: str = WITHOUT_ACCOUNTS,
    start_accounts: Callable[[Cluster], None] = lambda cluster: None,
    blind: bool = False,
) -> Iterator[Cluster]:
    """Up, with all nodes idle; gone with all that its jobs have left. `accounting`: lines of its configuration;
    `start_accounts` starts what keeps accounts, once munge answers; `blind`: see `Cluster.start_node`."""
    cluster = Cluster(host, blind)
    host.work.mkdir(exist_ok=True)
    shutil.rmtree(cluster.home, ignore_errors=True)
    (cluster.home / "state").mkdir(parents=True)
    _write_configuration(cluster.home, host.address, accounting)
    cluster.start_munge()
    start_accounts(cluster)
    cluster.start_controller()
    for number in range(NODES):
        cluster.start_node(f"n{number + 1}")
    end = time.monotonic() + DEADLINE
    while cluster.run("sinfo", "-h", "-N", "-p", "gpu", "-o", "%T", check=False).split() != ["idle"] * NODES:
        assert time.monotonic() < end, cluster.run("sinfo", check=False)
        time.sleep(0.1)
    try:
        yield cluster
    finally:
        host.kill_everything()
        host.start_sshd()


def cluster_impossible() -> str:
    """Why there can be no cluster here; empty where there can."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    return f"a cluster needs {', '.join(missing)}: install slurmctld, slurmd, slurm-client, munge" if missing else ""


def _write_configuration(home: Path, address: str, accounting: str) -> None:
    (home / "munge.key").write_bytes(os.urandom(128))
    (home / "munge.key").chmod(0o600)
    host = socket.gethostname().partition(".")[0]
    conf = CONF.format(
        host=host,
        home=home,
        address=address,
        nodes=NODES,
        last_port=16820 + NODES,
        gpus=GPUS,
        accounting=accounting.format(home=home),
    )
    (home / "slurm.conf").write_text(conf)
    lines = []
    for number in range(1, NODES + 1):
        for gpu in range(GPUS):
            os.mknod(home / f"n{number}-{gpu}", 0o600 | 0o020000, os.makedev(1, 3))
        lines.append(f"NodeName=n{number} Name=gpu File={home}/n{number}-[0-{GPUS - 1}]")
    (home / "gres.conf").write_text("\n".join(lines) + "\n")


def _kill(pid_file: Path) -> None:
    with suppress(OSError, ValueError):
        os.kill(int(pid_file.read_text()), 9)
