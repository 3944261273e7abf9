"""Answers of a server on this machine."""

from pathlib import Path

import pytest

from rollouts_core.loopback import opened
from tests.answering import SSH, answering, ok

MOVED = b"HTTP/1.1 301 Moved\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n"


def test_an_answer_is_read() -> None:
    with answering(ok(b"true")) as url, opened(url, 5.0) as answer:
        assert answer.status == 200 and answer.read() == b"true"


def test_the_environments_proxy_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    with answering(ok(b"true")) as url, opened(url, 5.0) as answer:
        assert answer.read() == b"true"


@pytest.mark.parametrize(
    "said",
    [
        SSH,
        b"",
        ok(b"{", length=500),
        ok(b"{}", length=10**30),
        MOVED % b"/",
        MOVED % b"http://[",
        b"HTTP/1.0 500 X\r\n\r\n",
    ],
)
def test_whatever_else_is_said_is_an_os_error(said: bytes) -> None:
    with answering(said) as url, pytest.raises(OSError, match=r"."), opened(url, 5.0) as answer:
        answer.read()


def test_a_file_is_no_server(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="unknown url type"), opened((tmp_path / "a").as_uri(), 5.0):
        pass
