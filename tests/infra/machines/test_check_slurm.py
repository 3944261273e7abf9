"""What is made of what a cluster says of itself."""

from typing import Any

from infra.inventory import Slurm
from infra.machines.check_slurm import accounts_finding, node_findings, partition_finding, quota_finding

ROWS = [
    {"partition": "gpu*", "state": "up", "limit": "2-00:00:00", "nodes": "4", "gres": "gpu:h100:8"},
    {"partition": "cpu", "state": "down", "limit": "infinite", "nodes": "9", "gres": "(null)"},
]
NODE: dict[str, Any] = {
    "node": "n1", "python": "3.11.2", "sees": True, "network": True, "disk_free": 2**31, "lacks": [],
    "namespaces": True,
}  # fmt: skip
NLP = {
    "account": "nlp", "partition": "gpu", "qos": "normal,high", "maxjobs": "", "maxsubmit": "", "maxwall": "12:00:00",
    "maxtres": "gres/gpu=8", "grptres": "",
}  # fmt: skip


def test_the_default_partition_is_found() -> None:
    finding = partition_finding(None, ROWS)
    assert finding.state == "ok"
    assert finding.found == "gpu: 4 nodes with gpu:h100:8, at most 2-00:00:00 a job"


def test_a_partition_that_is_not_there_or_down_fails() -> None:
    assert partition_finding("big", ROWS).advice == "set slurm.partition to one of cpu, gpu"
    assert partition_finding("cpu", ROWS).state == "failed"


def test_an_account_or_quality_of_service_of_others_fails() -> None:
    assert accounts_finding(Slurm(account="vision"), [NLP]).advice == "set slurm.account to one of nlp"
    assert accounts_finding(Slurm(account="nlp", qos="long"), [NLP]).advice == "set slurm.qos to one of high, normal"
    found = accounts_finding(Slurm(account="nlp", qos="high"), [NLP]).found
    assert found == "nlp on gpu (qos normal,high, time of a job: 12:00:00, of a job: gres/gpu=8)"


def test_a_quota_that_is_nearly_full_is_a_warning() -> None:
    assert quota_finding({"where": "/scratch", "used": 80 * 2**30, "limit": 100 * 2**30}).state == "ok"
    nearly = quota_finding({"where": "/scratch", "used": 95 * 2**30, "limit": 100 * 2**30})
    assert (nearly.state, nearly.found) == ("warning", "/scratch: 95% of 100.0 GiB are used")


def test_what_a_node_does_not_see_is_told() -> None:
    plain = Slurm()
    assert [finding.state for finding in node_findings(NODE, "/work", plain)] == ["ok", "ok"]
    blind = {**NODE, "sees": False}
    (_, shared) = node_findings(blind, "/work", plain)
    assert shared.found == "/work of the login node is not seen on n1"
    (_, shared) = node_findings(blind, "/work", Slurm(sshfs=True))
    assert (shared.state, shared.found) == ("ok", "n1 mounts /work from the login node")
    for lacks in ({"lacks": ["sshfs"]}, {"namespaces": False}):
        assert [finding.state for finding in node_findings({**blind, **lacks}, "/work", Slurm(sshfs=True))][
            -1
        ] == "failed"
    assert [finding.state for finding in node_findings({**NODE, "network": False}, "/work", plain)][-1] == "warning"
    assert [finding.state for finding in node_findings({"error": "none was free"}, "/work", plain)] == ["warning"]


def test_a_nodes_disk_and_what_runs_containers_are_looked_for() -> None:
    asked = Slurm(local_disk="$TMPDIR", container="apptainer exec --nv a.sif")
    *_, disk = node_findings(NODE, "/work", asked)
    assert disk.found == "2.0 GiB free at $TMPDIR"
    *_, container = node_findings({**NODE, "lacks": ["apptainer"]}, "/work", asked)
    assert (container.state, container.found) == ("failed", "apptainer is not on n1")
