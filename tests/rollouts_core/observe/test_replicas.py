"""What is shown of replicas: a table of now, and a band for each over the steps."""

from typing import Any

import pytest

from rollouts_core.observe.replica_bands import COLUMNS, bands
from rollouts_core.observe.replica_table import replica_rows

B, C = "replicas/host-b:replica-0/tokens_per_second", "replicas/host-c:replica-0/tokens_per_second"


def told(name: str, state: str = "ready") -> dict[str, Any]:
    return {"name": name, "state": state, "since": 0.0, "starts": 2}


def test_a_row_says_who_serves_with_which_weights_and_how_fast() -> None:
    metrics = {B: 120.4, "weight_version": 7.0, "timing_s/weight_sync/bring/host-b": 0.25}
    metrics["weight_sync/bytes/host-b"] = 14.2e6
    rows = replica_rows([told("host-c:replica-0"), told("host-b:replica-0"), told("host-d:replica-0", "away")], metrics)
    first, second, third = rows
    assert first["replica"] == "host-b:replica-0" and first["starts"] == "2" and first["since"]
    assert (first["state"], first["tokens/s"], first["weights"], first["last sync"]) == (
        "serves", "120", "version 7", "14.2 MB in 0.25 s",
    )  # fmt: skip
    assert (second["state"], second["tokens/s"], second["weights"]) == ("waits for weights", "", "")
    assert third["state"] == "not reached"


def test_a_band_shows_where_a_replica_was_away() -> None:
    steps = [{"step": step, C: 50.0} | ({B: 100.0} if step in (1, 2, 5) else {}) for step in range(1, 6)]
    first, second = bands(steps)
    assert first.name == "host-b:replica-0" and first.mean == 100.0
    assert [(cell.first, cell.last, cell.tokens_per_second, cell.strength) for cell in first.cells] == [
        (1, 2, 100.0, 1.0), (3, 4, 0.0, 0.0), (5, 5, 100.0, 1.0),
    ]  # fmt: skip
    assert [(cell.first, cell.last, cell.strength) for cell in second.cells] == [(1, 5, 0.5)]
    assert sum(cell.share for cell in first.cells) == pytest.approx(1.0)


def test_a_band_of_many_steps_has_no_more_cells_than_columns() -> None:
    steps = [{"step": step, B: float(step % 2)} for step in range(1, 5 * COLUMNS)]
    (band,) = bands(steps)
    assert len(band.cells) <= COLUMNS and band.cells[-1].last == steps[-1]["step"]


def test_there_are_no_bands_without_replicas() -> None:
    assert bands([]) == [] and bands([{"step": 1, "reward": 0.5}]) == []
