"""What is told of replicas that do not say which weights they hold."""

import json
from pathlib import Path

import pytest

from infra.host.checksums import checksums_here
from tests.answering import SSH, answering, ok


@pytest.mark.parametrize("said", [SSH, ok(b"{", length=500), ok(b"[]"), ok(b'{"weight_version": "1", "ranks": [1]}')])
def test_an_answer_that_cannot_be_read_is_told_as_the_replicas_problem(said: bytes, tmp_path: Path) -> None:
    (tmp_path / "serve").mkdir()
    with answering(said) as url:
        replicas = [{"name": "r0", "url": url, "state": "ready"}]
        (tmp_path / "serve" / "servers.json").write_text(json.dumps({"replicas": replicas}))
        (told,) = checksums_here(tmp_path, "serve")
    assert told["name"] == "r0" and told["problem"].startswith("it does not say: ")
