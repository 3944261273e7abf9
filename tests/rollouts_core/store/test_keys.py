import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts_core.config import Jsonl, RLConfig, SFTConfig
from rollouts_core.config.algorithms import GRPO
from rollouts_core.store.keys import canonical, canonical_json, key_of

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
)


@given(plain)
def test_equal_values_have_equal_keys_in_any_order(value: Any) -> None:
    shuffled = dict(reversed(value.items())) if isinstance(value, dict) else value
    assert key_of(shuffled) == key_of(value)


@given(plain, plain)
def test_different_values_have_different_encodings(one: Any, other: Any) -> None:
    if canonical_json(one) == canonical_json(other):
        assert one == other


@pytest.mark.parametrize("value", [Path("x"), {1, 2}, math.nan, math.inf, object(), b"x", {1: 2}, len])
def test_what_has_no_canonical_form_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"spec\.inner"):
        canonical({"inner": value}, "spec")


def test_identity_fields_change_keys_and_operational_ones_do_not() -> None:
    sft = SFTConfig(learning_rate=1e-3)
    assert key_of(replace(sft, log_every=77, checkpoint_every=5)) == key_of(sft)
    assert key_of(replace(sft, learning_rate=2e-3)) != key_of(sft)
    assert key_of(replace(RLConfig(), algorithm=GRPO(clip_high=0.28))) != key_of(RLConfig())


def test_a_file_enters_by_content_not_by_path() -> None:
    assert key_of(Jsonl(path=Path("a"))) == key_of(Jsonl(path=Path("b")))
