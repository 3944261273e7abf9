"""Which replicas are told to hold other weights than the rest."""

from typing import Any

import pytest

from flows.checksums import strangers


def told(*held: tuple[str, str]) -> list[dict[str, Any]]:
    return [
        {"name": f"r{number}", "version": version, "checksum": checksum}
        for number, (version, checksum) in enumerate(held)
    ]


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ([("1", "a")], set()),
        ([("1", "a"), ("1", "a"), ("1", "b")], {"r2"}),
        ([("1", "a"), ("1", "b")], {"r0", "r1"}),
        ([("1", "a"), ("2", "b"), ("2", "b")], set()),
        ([("1", "a"), ("1", "a"), ("1", "b"), ("1", "b")], {"r0", "r1", "r2", "r3"}),
    ],
)
def test_who_differs_from_most_of_the_same_version(held: list[tuple[str, str]], expected: set[str]) -> None:
    silent = {"name": "silent", "problem": "it is away"}
    assert strangers([*told(*held), silent]) == expected
