"""The GPU benchmark is ready for a GPU: here it runs its small shapes."""

import pytest

from tests.benchmarks import gpu


def test_the_gpu_benchmark_runs_dry(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", "--dry"])
    monkeypatch.setattr(gpu, "REPEATS", 1)
    monkeypatch.setattr("torch.nn.Module.compile", lambda self, **options: None)  # which takes its time
    assert gpu.main() == 0
    told = capsys.readouterr().out
    parts = ("SFT 512", "SFT, compiled", "RL 512", "generation", "weights to the host", "GRPO, 16 answers")
    assert all(part in told for part in parts)
