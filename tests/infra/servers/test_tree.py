"""Who passes new weights on to whom."""

from hypothesis import given
from hypothesis import strategies as st

from infra.servers.tree import FANOUT, onward


@given(st.integers(0, 200))
def test_each_machine_behind_the_first_has_one_that_passes_on_to_it(count: int) -> None:
    names = [f"host-{number}" for number in range(count)]
    told = onward(names)
    assert sorted(name for below in told.values() for name in below) == sorted(names[FANOUT:])
    assert all(len(below) <= FANOUT for below in told.values())
    for name, below in told.items():
        assert all(names.index(name) < names.index(other) for other in below)


def test_a_few_machines_are_all_sent_to_by_the_trainer() -> None:
    assert not any(onward(["a", "b", "c", "d"]).values())
