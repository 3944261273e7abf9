"""The version and a checksum of the weights that each replica holds, as the servers report them. Standard
library only.

Decision: the server itself computes the checksum, of the tensors that it computes with. Two engines give two checksums
of the same weights, so only replicas of one pool are compared.
"""

import json
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rollouts_core.errors import MISSHAPEN
from rollouts_core.loopback import opened

SECONDS = 300.0
"""The deadline of a replica's answer: it reads all of its weights."""


def checksums_here(jobs: Path, name: str) -> list[dict[str, Any]]:
    """For each replica of the job: `name`, with `version` and `checksum`, or with `problem`."""
    try:
        replicas = json.loads((jobs / name / "servers.json").read_text())["replicas"]
    except (OSError, ValueError, KeyError):
        return []
    if not replicas:
        return []
    with ThreadPoolExecutor(len(replicas)) as threads:
        return list(threads.map(_checksum, replicas))


def _checksum(replica: Mapping[str, Any]) -> dict[str, Any]:
    if replica["state"] != "ready":
        return {"name": replica["name"], "problem": f"it is {replica['state']}"}
    try:
        told = _asked(f"{replica['url']}/weights_checker", {"action": "checksum"})
        version = _asked(f"{replica['url']}/model_info")["weight_version"]
        ranks = told.get("per_engine_checksum") or told["ranks"]
        checksum = ranks if isinstance(ranks, str) else " ".join(rank["per_gpu_checksum"] for rank in ranks)
    except (*MISSHAPEN, OSError) as error:
        return {"name": replica["name"], "problem": f"it does not say: {type(error).__name__}: {error}"}
    return {"name": replica["name"], "version": version, "checksum": checksum}


def _asked(url: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with opened(asked, SECONDS) as answer:
        found: dict[str, Any] = json.load(answer)
    return found
