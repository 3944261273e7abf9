"""What is made of what a cluster says of itself."""

from typing import Any

from infra.inventory import Slurm
from infra.machines.check_slurm import accounts_finding, node_findings, partition_finding

ROWS = [
    {"partition": "gpu*", "state": "up", "limit": "2-00:00:00", "nodes": "4", "gres": "gpu:h100:8"},
    {"partition": "cpu", "state": "down", "limit": "infinite", "nodes": "9", "gres": "(null)"},
]
NODE: dict[str, Any] = {"node": "n1", "python": "3.11.2", "sees": True, "network": True}


def test_the_default_partition_is_found() -> None:
    finding = partition_finding(None, ROWS)
    assert finding.state == "ok"
    assert finding.found == "gpu: 4 nodes with gpu:h100:8, at most 2-00:00:00 a job"


def test_a_partition_that_is_not_there_or_down_fails() -> None:
    assert partition_finding("big", ROWS).advice == "set slurm.partition to one of cpu, gpu"
    assert partition_finding("cpu", ROWS).state == "failed"


def test_an_account_of_others_fails() -> None:
    rows = ["nlp|gpu|normal,high"]
    assert accounts_finding(Slurm(account="vision"), rows).advice == "set slurm.account to one of nlp"
    assert accounts_finding(Slurm(account="nlp"), rows).found == "nlp gpu normal,high"


def test_what_a_node_does_not_see_is_told() -> None:
    assert [finding.state for finding in node_findings(NODE, "/work")] == ["ok", "ok"]
    blind = list(node_findings({**NODE, "sees": False}, "/work"))
    assert blind[-1].found == "/work of the login node is not seen on n1"
    assert [finding.state for finding in node_findings({**NODE, "network": False}, "/work")][-1] == "warning"
    assert [finding.state for finding in node_findings({"error": "none was free"}, "/work")] == ["warning"]
