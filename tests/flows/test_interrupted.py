"""An interrupt ends a command as one, whatever a library makes of it on its way."""

import argparse
import signal

import pytest

from flows import cli


@pytest.mark.parametrize(("told", "status"), [([signal.SIGINT], cli.INTERRUPTED), ([], None)])
def test_an_interrupt_that_a_library_wraps_is_told_as_one(
    told: list[int], status: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrapped(options: argparse.Namespace) -> int:
        raise ValueError("Error calling function: KeyboardInterrupt")

    monkeypatch.setattr(cli, "runs_command", wrapped)
    monkeypatch.setattr(cli, "_told_to_end", told)
    if status is None:
        with pytest.raises(ValueError, match="KeyboardInterrupt"):
            cli.main(["runs"])
    else:
        assert cli.main(["runs"]) == status
        assert capsys.readouterr().err == "interrupted\n"
