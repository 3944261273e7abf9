"""Weights on their way to servers: buckets, and a disk that is full."""

import errno
import subprocess
from pathlib import Path

import anyio
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from rollouts_core.inference.replicas import Replica
from rollouts_core.inference.transports import DiskTransport, buckets


@given(st.lists(st.integers(1, 40), max_size=20), st.integers(1, 200))
def test_buckets_hold_everything_once_in_order_and_no_more_than_allowed(sizes: list[int], limit: int) -> None:
    weights = {f"w{number}": torch.zeros(size) for number, size in enumerate(sizes)}
    cut = list(buckets(weights, limit))
    assert [name for bucket in cut for name in bucket] == list(weights)
    for bucket in cut:
        assert sum(tensor.nbytes for tensor in bucket.values()) <= limit or len(bucket) == 1


def test_a_version_is_written_whole_and_the_one_before_goes(tmp_path: Path) -> None:
    transport = DiskTransport(tmp_path, limit=100)
    weights = {f"w{number}": torch.full((16,), float(number)) for number in range(5)}

    async def write() -> Path:
        await transport.bring([], weights, 1)
        await transport.bring([], weights, 2)
        return transport.place(Replica("any", ""), 2)

    place = anyio.run(write)
    assert [path.name for path in tmp_path.iterdir()] == ["version-2"]
    assert len(list(place.glob("*.safetensors"))) == 5
    found = {name: tensor for file in place.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items()) and len(found) == 5


def test_a_full_disk_is_told_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path], check=False).returncode:
        pytest.skip("a small tmpfs cannot be mounted here")
    try:
        with pytest.raises(OSError, match="No space left") as caught:
            anyio.run(DiskTransport(tmp_path).bring, [], {"w": torch.zeros(2**20)}, 1)
        assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(tmp_path)
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)
