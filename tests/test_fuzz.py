"""A few hundred damaged inputs for everything that reads what others have written, the same ones every time.

`python -m tests.fuzz` goes on from there, for as long as one likes.
"""

import random

import pytest

from tests.fuzz.found import TARGETS, Findings

INPUTS = 1000
SEED = 1


@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # of Python configs
@pytest.mark.parametrize("target", TARGETS)
def test_what_is_damaged_is_answered_by_a_message(target: str) -> None:
    findings, draw = Findings(), random.Random(SEED)
    with TARGETS[target].opened() as read:
        for _ in range(INPUTS):
            findings.look(TARGETS[target], read, draw)
    assert not findings.found, findings.found[0]
