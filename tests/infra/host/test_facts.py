"""What nvidia-smi says, as facts."""

import pytest

from infra.host import facts


def test_what_a_gpu_does_not_say_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "0, 97, 60000, 301.40, 41\n1, [N/A], 5, [Not Supported], 30\nno devices were found\n"
    monkeypatch.setattr(facts, "_asked", lambda command: said)
    first, second = facts.gpu_use()
    assert first == {"index": 0, "utilization": 0.97, "memory_used": 60000.0, "power": 301.4, "temperature": 41.0}
    assert second["utilization"] is second["power"] is None
