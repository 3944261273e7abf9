"""Accounts for a Slurm cluster of the tests, kept by a real slurmdbd in a real MariaDB.

`root` may use the account `nlp` with three qualities of service: `normal`; `high`, which preempts it; and `small`,
where jobs get hardly any memory.
"""

import shutil
import socket
import subprocess
import time

from tests.cluster import Cluster
from tests.hosts import DEADLINE, PATH

PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db")
DATABASE_PORT = 16820
CONF = """AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=16818
AccountingStoragePass={home}/munge.socket
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=associations,limits,qos
PreemptType=preempt/qos"""
DAEMON = """AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort=16818
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={port}
StorageUser=slurm
StoragePass=tests
StorageLoc=accounts
PidFile={home}/slurmdbd.pid
LogFile={home}/slurmdbd.log
"""
FIRST = "CREATE USER slurm@localhost IDENTIFIED BY 'tests';\nGRANT ALL ON *.* TO slurm@localhost;"
ACCOUNTS = (
    "add cluster trial",
    "add qos high preempt=normal priority=1000",
    "add qos small flags=DenyOnLimit maxtresperjob=mem=100",
    "add account nlp",
    "add user root account=nlp qos=normal,high,small defaultqos=normal",
)


def accounts_impossible() -> str:
    """Why there can be no accounts here; empty where there can."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    return f"accounts of a cluster need {', '.join(missing)}: install slurmdbd, mariadb-server-core" if missing else ""


def start_accounts(cluster: Cluster) -> None:
    """A database, slurmdbd and what is in it; they end with the cluster's host."""
    home, host = cluster.home, socket.gethostname().partition(".")[0]
    cluster.run(
        "mariadb-install-db", "--no-defaults", f"--datadir={home}/database", "--user=root", "--skip-test-db",
        "--auth-root-authentication-method=normal",
    )  # fmt: skip
    (home / "first.sql").write_text(f"{FIRST}\n")
    there = ["nsenter", f"--net=/run/netns/{cluster.host.namespace}"]
    subprocess.Popen(
        [*there, "mariadbd", "--no-defaults", "--user=root", f"--datadir={home}/database",
         f"--socket={home}/database.socket", f"--port={DATABASE_PORT}", "--bind-address=127.0.0.1",
         f"--init-file={home}/first.sql", f"--pid-file={home}/mariadbd.pid"],
        env=cluster.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    (home / "slurmdbd.conf").write_text(DAEMON.format(home=home, host=host, port=DATABASE_PORT))
    (home / "slurmdbd.conf").chmod(0o600)
    end = time.monotonic() + DEADLINE
    while not (home / "mariadbd.pid").exists():
        assert time.monotonic() < end, "the database does not start"
        time.sleep(0.1)
    cluster.run("slurmdbd")
    while "trial" not in cluster.run("sacctmgr", "-n", "show", "cluster", check=False):
        assert time.monotonic() < end, cluster.run("sacctmgr", "-n", "show", "cluster", check=False)
        cluster.run("sacctmgr", "-i", *ACCOUNTS[0].split(), check=False)
        time.sleep(0.2)
    for words in ACCOUNTS[1:]:
        cluster.run("sacctmgr", "-i", *words.split())
