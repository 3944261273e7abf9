"""The pins of constraints.txt are those that are wanted, and all of them; the page of licences has them."""

from importlib.metadata import distribution, distributions

import pytest

from tests.dependencies import PAGE, US, normal, pins, wanted

OF_EVERY_ENVIRONMENT = {"pip", "setuptools", "wheel"}
OF_CUDA = ("nvidia-", "cuda-", "triton")
"""Pinned by torch itself, where its build is one for GPUs."""


@pytest.fixture(autouse=True)
def _pinned_versions() -> None:
    if distribution("torch").version.partition("+")[0] != pins()["torch"].partition("+")[0]:
        pytest.skip("other versions than the pinned ones are installed")


def test_every_pin_is_wanted_and_every_dependency_is_pinned() -> None:
    installed = {normal(found.metadata["Name"]) for found in distributions()}
    assert (pins().keys() & installed) - wanted().keys() == set()
    unpinned = wanted().keys() - pins().keys() - OF_EVERY_ENVIRONMENT - {US}
    assert {name for name in unpinned if not name.startswith(OF_CUDA)} == set()


def test_the_page_of_licences_has_every_pin_with_its_version() -> None:
    """`python -m tests.dependencies` writes it anew."""
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    told = {row[1].strip(): row[2].strip() for row in rows[1:]}
    assert told == {name: version.partition("+")[0] for name, version in pins().items()}
