"""What is noted is ended, the last first, whatever fails or interrupts."""

import pytest

from rollouts_core.endings import Endings
from rollouts_core.errors import RolloutsError


def failing() -> None:
    raise OSError("is away")


def test_the_last_is_ended_first_and_a_failure_keeps_none_from_ending(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []
    endings = Endings()
    with endings:
        endings.note("one", lambda: ended.append("one"))
        endings.note("two", failing)
        endings.note("three", lambda: ended.append("three"))
        endings.note("four", lambda: ended.append("four"))
        endings.forget("four")
    assert ended == ["three", "one"]
    assert "two could not be ended: is away" in caplog.text


def test_an_interrupt_while_they_end_leaves_nothing() -> None:
    ended: list[str] = []

    def interrupted() -> None:
        ended.append("tried")
        if len(ended) == 1:
            raise KeyboardInterrupt

    endings = Endings()
    endings.note("first", lambda: ended.append("first"))
    endings.note("last", interrupted)
    with pytest.raises(KeyboardInterrupt), endings:
        pass
    assert ended == ["tried", "tried", "first"]


def test_nothing_begins_any_more_once_all_has_ended() -> None:
    endings = Endings()
    with endings:
        pass
    with pytest.raises(RolloutsError, match="a job is not started"):
        endings.note("a job", failing)
    endings.end_all()
