"""Records of rollouts: whole after any kill, cut where training goes on, small."""

import json
import lzma
import random
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollouts_core.rollout import record_files
from rollouts_core.rollout.record_files import (
    LATEST,
    RolloutRecord,
    append_record,
    keep_rollouts,
    read_rollouts,
)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_files, "PART_BYTES", 300)


def write(directory: Path, steps: range, each: int = 3) -> list[tuple[int, int]]:
    record = RolloutRecord(directory)
    made = [(step, sample) for step in steps for sample in range(each)]
    for step, sample in made:
        record.log({"sample": sample, "response": "ab" * 20}, step)
    return made


def read(directory: Path) -> list[tuple[int, int]]:
    return [(found["step"], found["sample"]) for found in read_rollouts(directory)]


def test_a_short_record_is_one_plain_file(tmp_path: Path) -> None:
    made = write(tmp_path, range(1, 2))
    assert [path.name for path in tmp_path.iterdir()] == [LATEST]
    assert [json.loads(line)["sample"] for line in (tmp_path / LATEST).read_text().splitlines()] == [0, 1, 2]
    assert read(tmp_path) == made


def test_a_long_one_is_compressed_part_by_part_and_read_by_other_tools(tmp_path: Path) -> None:
    made = write(tmp_path, range(1, 30))
    parts = sorted(tmp_path.glob("*.xz"))
    assert len(parts) > 5 and (tmp_path / LATEST).stat().st_size < 600
    assert read(tmp_path) == made
    frames = [pd.read_json(path, lines=True) for path in [*parts, tmp_path / LATEST]]
    assert pd.concat(frames)["step"].tolist() == [step for step, _ in made]


def test_nothing_is_read_where_there_is_no_record(tmp_path: Path) -> None:
    assert read(tmp_path) == []
    keep_rollouts(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(stop=st.integers(1, 25), last=st.integers(0, 26), cut=st.integers(0, 60))
def test_it_goes_on_from_any_step_to_the_same_files(
    stop: int, last: int, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also where the last line is half written."""
    whole, resumed = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("resumed")
    write(whole, range(1, 27))
    write(resumed, range(1, stop + 1))
    with (resumed / LATEST).open("a") as file:
        file.write('{"step": 1, "sample":'[:cut])
    last = min(last, stop)
    keep_rollouts(resumed, last)
    assert read(resumed) == [(step, sample) for step in range(1, last + 1) for sample in range(3)]
    write(resumed, range(last + 1, 27))
    files = {path.name: path.read_bytes() for path in whole.iterdir()}
    assert {path.name: path.read_bytes() for path in resumed.iterdir()} == files


@pytest.mark.parametrize("moment", ["renamed", "half compressed", "compressed"])
def test_a_kill_while_it_is_compressed_loses_nothing(moment: str, tmp_path: Path) -> None:
    made = write(tmp_path, range(1, 20))
    last = sorted(tmp_path.glob("*.xz"))[-1]
    plain = last.with_suffix("")
    plain.write_bytes(lzma.decompress(last.read_bytes()))
    if moment != "compressed":
        last.unlink()
    if moment == "half compressed":
        plain.with_suffix(".unfinished").write_bytes(b"half")
    assert read(tmp_path) == made
    RolloutRecord(tmp_path)
    assert read(tmp_path) == made
    assert not plain.exists() and last.exists()


def test_a_kill_while_it_is_cut_loses_nothing(tmp_path: Path) -> None:
    """After the last file has been replaced by the beginning of a part, and before that part is gone."""
    made = write(tmp_path, range(1, 20))
    part = sorted(tmp_path.glob("*.xz"))[-1]
    first, *_, last = [json.loads(line)["step"] for line in lzma.decompress(part.read_bytes()).splitlines()]
    assert first < last
    content = part.read_bytes()
    keep_rollouts(tmp_path, first)
    part.write_bytes(content)
    keep_rollouts(tmp_path, first)
    assert read(tmp_path) == [place for place in made if place[0] <= first]


def test_records_are_joined_in_order(tmp_path: Path) -> None:
    made = []
    for number, steps in enumerate((range(1, 3), range(3, 20), range(20, 21), range(21, 40))):
        made += write(tmp_path / str(number), steps)
        append_record(tmp_path / "all", tmp_path / str(number))
    assert read(tmp_path / "all") == made
    assert (tmp_path / "all" / LATEST).is_file()


def test_long_answers_take_few_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_files, "PART_BYTES", 2**20)
    draw = random.Random(0)
    words = [f" word{number}" for number in range(2_000)]
    record, tokens = RolloutRecord(tmp_path), 0
    for step in range(1, 9):
        ids = [min(draw.randrange(1, 2_000) for _ in range(4)) for _ in range(8_000)]
        pieces = [words[place] for place in ids]
        logprobs = [round(-draw.expovariate(2), 5) for _ in ids]
        text = "".join(pieces)
        record.log({"tokens": ids, "pieces": pieces, "rollout_log_probs": logprobs, "response": text}, step)
        tokens += len(ids)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.xz"))
    assert size / tokens < 7
