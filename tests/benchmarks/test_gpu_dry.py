"""The GPU benchmark is ready for a GPU: here it runs its small shapes."""

import pytest

from tests.benchmarks import gpu


def test_the_gpu_benchmark_runs_dry(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", "--dry"])
    monkeypatch.setattr(gpu, "REPEATS", 1)
    assert gpu.main() == 0
    told = capsys.readouterr().out
    assert all(name in told for name in ("small SFT 512", "small RL 512", "small generation", "weights to the host"))
