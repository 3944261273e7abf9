"""Changes between two versions of bytes: any two come back, and what is no change is refused."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollouts_core import weight_changes
from rollouts_core.weight_changes import PIECE, change, changed, pieces


@pytest.mark.parametrize("has_numpy", [True, False])
@given(st.binary(max_size=300), st.data())
def test_before_and_change_give_what_is_behind(has_numpy: bool, before: bytes, data: st.DataObject) -> None:
    after = data.draw(st.binary(min_size=len(before), max_size=len(before)))
    with mock.patch.object(weight_changes, "numpy", weight_changes.numpy if has_numpy else None):
        made = change(before, after)
    with mock.patch.object(weight_changes, "numpy", None if has_numpy else weight_changes.numpy):
        assert changed(before, made) == after


def test_a_small_step_of_bfloat16_weights_is_a_small_change() -> None:
    weights = 0.02 * torch.randn(PIECE // 2, generator=torch.Generator().manual_seed(0))
    step = 1e-6 * torch.randn(PIECE // 2, generator=torch.Generator().manual_seed(1))
    before, after = (bytes(values.bfloat16().view(torch.uint8).numpy()) for values in (weights, weights + step))
    assert before != after
    assert len(change(before, after)) < PIECE / 10


@pytest.mark.parametrize("damaged", [b"", b"no change", change(b"1234", b"4321")])
def test_what_is_no_change_of_the_piece_is_refused(damaged: bytes) -> None:
    with pytest.raises(ValueError, match="change"):
        changed(b"12345", damaged)


def test_pieces_are_the_whole_in_order() -> None:
    data = bytes(range(256)) * (PIECE // 100)
    assert b"".join(pieces(data)) == data
    assert max(map(len, pieces(data))) == PIECE
