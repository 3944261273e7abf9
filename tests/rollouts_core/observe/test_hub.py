"""The hub at its HTTP edge: a stand-in that speaks it, and what is pushed there."""

import base64
import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from rollouts_core.errors import BadInput, StoreUnavailable
from rollouts_core.observe.hub import push_policy

TOKEN = "hf_tests-secret"
REPOSITORY = "me/sums"


@dataclass
class StandInHub:
    """Repositories, what was committed to them, and the large files that were put before."""

    url: str = ""
    repositories: dict[str, bool] = field(default_factory=dict)
    """By name, whether private."""
    files: dict[str, bytes] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    refuses: int = 0
    """A status to refuse commits with."""

    def post(self, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            self.repositories[name] = asked.get("private") or asked.get("visibility") == "private"
            return 200, {"url": f"{self.url}/{name}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if "/preupload/" in path:
            listed = json.loads(body)["files"]
            modes = ["lfs" if file["path"].endswith(".safetensors") else "regular" for file in listed]
            named = [(file["path"], mode) for file, mode in zip(listed, modes, strict=True)]
            return 200, {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False, "oid": None} for p, m in named]}
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            upload = {"objects": [
                {**entry, "actions": {"upload": {"href": f"{self.url}/large/{entry['oid']}"}}} for entry in objects
            ]}  # fmt: skip
            return 200, {**upload, "transfer": "basic"}
        if "/commit/" in path:
            if self.refuses:
                return self.refuses, {"error": "no right to write"}
            for line in body.splitlines():
                self._commit(json.loads(line))
            return 200, {"commitUrl": f"{self.url}/{REPOSITORY}/commit/1", "commitOid": "1", "success": True}
        return 404, {"error": path}

    def _commit(self, line: dict[str, Any]) -> None:
        value = line["value"]
        if line["key"] == "file":
            self.files[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "lfsFile":
            self.files[value["path"]] = self.large[value["oid"]]


@pytest.fixture
def hub() -> Iterator[StandInHub]:
    made = StandInHub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            made.tokens.add(self.headers.get("Authorization", ""))
            self._answer(*made.post(self.path.split("?")[0], self._body()))

        def do_PUT(self) -> None:
            made.large[self.path.rpartition("/")[2]] = self._body()
            self._answer(200, {})

        def do_GET(self) -> None:
            self._answer(404, {"error": self.path})

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                parts = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def _answer(self, status: int, data: Any) -> None:
            content = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield made
        server.shutdown()


@pytest.fixture
def policy(tmp_path: Path, hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    (tmp_path / "policy" / "model.safetensors").write_bytes(b"weights")
    return tmp_path / "policy"


def test_a_directory_is_pushed_to_a_private_repository_with_its_card(hub: StandInHub, policy: Path) -> None:
    assert push_policy(REPOSITORY, policy, "# A card\n") == f"{hub.url}/{REPOSITORY}"
    assert hub.repositories == {REPOSITORY: True}
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert hub.files == {"README.md": b"# A card\n", "config.json": b"{}", "model.safetensors": b"weights"}


@pytest.mark.parametrize(("status", "error"), [(403, BadInput), (401, BadInput)])
def test_what_the_hub_refuses_is_told(hub: StandInHub, policy: Path, status: int, error: type[Exception]) -> None:
    hub.refuses = status
    with pytest.raises(error, match=f"the hub refuses {REPOSITORY} with status {status}.*HF_TOKEN"):
        push_policy(REPOSITORY, policy, "")


def test_a_hub_that_is_away_may_come_back(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StoreUnavailable, match="the hub does not answer"):
        push_policy(REPOSITORY, policy, "")
