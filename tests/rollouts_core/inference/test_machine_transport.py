"""Weights to other machines, through real gates: once to each, again where it broke, left behind where it is silent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from infra.host import gate as gate_module
from infra.host.gate import Gate
from rollouts_core.errors import EngineUnavailable
from rollouts_core.inference import machine_transport
from rollouts_core.inference.machine_transport import (
    MachineTransport,
    _Bucket,
    _Changes,
    names_in,
    trees,
)
from rollouts_core.inference.members import Problems
from rollouts_core.inference.replicas import EngineMachine, Replica, Servers

WEIGHTS = {f"w{number}": torch.full((256,), float(number)) for number in range(6)}


@pytest.fixture(autouse=True)
def three_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two weights each."""
    monkeypatch.setattr(machine_transport, "PARTS", 3)


@dataclass
class Machines:
    """Fits `Fleet`."""

    there: dict[str, EngineMachine] = field(default_factory=dict)

    def ready(self) -> Servers:
        return Servers((), None, None, dict(self.there))

    def restart(self, replica: Replica, reason: str) -> None: ...


@asynccontextmanager
async def gates(tmp_path: Path, *names: str, chain: bool = False) -> AsyncIterator[Machines]:
    """`chain`: each passes on to the next, and only the first is reached from here."""
    machines, servers = Machines(), []
    ways: list[dict[str, int]] = [{} for _ in names]
    for place, name in enumerate(names):
        memory = tmp_path / name
        memory.mkdir()
        servers.append(await Gate(tmp_path, memory, dict, ways[place]).open(0))
        port, reaches = servers[-1].sockets[0].getsockname()[1], names[place + 1 : place + 2] if chain else ()
        machines.there[name] = EngineMachine(name, 0 if chain and place else port, memory, "", reaches)
        if chain and place:
            ways[place - 1][name] = port
    try:
        yield machines
    finally:
        for server in servers:
            server.close()


async def bring(machines: Machines, version: int = 1, weights: Any = WEIGHTS) -> tuple[MachineTransport, Problems]:
    transport = MachineTransport(machines)
    replicas = [Replica(f"{name}:replica-{number}", "", name) for name in machines.there for number in range(2)]
    try:
        return transport, await transport.bring(replicas, weights, version)
    finally:
        await transport.aclose()


def weights_in(place: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in place.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_transport, "AGAIN_SECONDS", 0.05)


def test_each_machine_gets_the_weights_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with gates(tmp_path, "a", "b") as machines:
            transport, problems = await bring(machines)
            assert problems == {}
            files = [path for path in (tmp_path / "a" / "version-1").iterdir() if path.suffix != ".sha256"]
            size = sum(path.stat().st_size for path in files)
            assert {name: told.bytes for name, told in transport.brought.items()} == {"a": size, "b": size}
            for name in ("a", "b"):
                place = transport.place(Replica(f"{name}:replica-0", "", name), 1)
                assert all(torch.equal(value, WEIGHTS[key]) for key, value in weights_in(place).items())
                assert len(list(place.glob("*.safetensors"))) == 3

    asyncio.run(main())


def test_a_transfer_that_breaks_goes_on_from_its_last_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    puts: list[str] = []
    real = Gate._put

    async def breaks_once(self: Gate, asked: dict[str, Any], *given: Any) -> dict[str, Any]:
        puts.append(asked["name"])
        if len(puts) == 2:
            raise OSError("the link is cut")
        return await real(self, asked, *given)

    monkeypatch.setattr(gate_module.Gate, "_put", breaks_once)

    async def main() -> None:
        async with gates(tmp_path, "a") as machines:
            _, problems = await bring(machines)
            assert problems == {}

    asyncio.run(main())
    names = [f"model-0000{number}.safetensors" for number in range(3)]
    assert puts == [names[0], names[1], names[1], names[2], "model.safetensors.index.json"]
    assert weights_in(tmp_path / "a" / "version-1").keys() == WEIGHTS.keys()


def test_a_machine_that_has_them_is_sent_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with gates(tmp_path, "a") as machines:
            await bring(machines)
            transport, problems = await bring(machines)
            assert problems == {} and transport.brought["a"].bytes == 0
            other = {name: value + 1 for name, value in WEIGHTS.items()}
            transport, _ = await bring(machines, weights=other)
            assert transport.brought["a"].bytes > 0
            assert torch.equal(weights_in(tmp_path / "a" / "version-1")["w0"], other["w0"])

    asyncio.run(main())


def test_a_machine_that_is_away_is_left_behind_and_the_others_are_not_held_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_transport, "SILENCE_SECONDS", 2.0)

    async def main() -> None:
        async with gates(tmp_path, "a", "b") as machines:
            machines.there["b"] = replace(machines.there["b"], port=0)
            with anyio.fail_after(30):
                transport, problems = await bring(machines)
            assert set(problems) == {"b:replica-0", "b:replica-1"} and set(transport.brought) == {"a"}
            assert isinstance(problems["b:replica-0"], EngineUnavailable)
            assert "b takes no weights: it is not connected" in str(problems["b:replica-0"])

    asyncio.run(main())


def test_what_was_damaged_on_its_way_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, spoilt = gate_module.weight_files.File.take, []

    def spoil(self: Any, piece: bytes) -> None:
        real(self, piece if spoilt else bytes(len(piece)))
        spoilt.append(True)

    monkeypatch.setattr(gate_module.weight_files.File, "take", spoil)

    async def main() -> None:
        async with gates(tmp_path, "a") as machines:
            _, problems = await bring(machines)
            assert problems == {}

    asyncio.run(main())
    assert torch.equal(weights_in(tmp_path / "a" / "version-1")["w1"], WEIGHTS["w1"])


HALF = {name: value.bfloat16() + number for number, (name, value) in enumerate(WEIGHTS.items())}


def test_of_bfloat16_weights_what_has_changed_is_sent(tmp_path: Path) -> None:
    """And a machine that lacks the version before gets them whole."""

    async def main() -> None:
        async with gates(tmp_path, "a", "b") as machines:
            transport = MachineTransport(machines)
            large = {name: torch.randn(2**14).bfloat16() for name in WEIGHTS}
            a, b = (Replica(f"{name}:replica-0", "", name) for name in "ab")
            assert await transport.bring([a], large, 1) == {}
            whole = transport.brought["a"].bytes
            changed = {name: value.clone() for name, value in large.items()}
            changed["w3"][7] += 1
            assert await transport.bring([a, b], changed, 2) == {}
            await transport.aclose()
            assert transport.brought["a"].bytes < whole / 10
            assert transport.brought["b"].bytes >= whole
            for replica in (a, b):
                there = weights_in(transport.place(replica, 2))
                assert all(torch.equal(value, changed[name]) for name, value in there.items())

    asyncio.run(main())


def test_changes_that_do_not_fit_what_is_there_are_followed_by_the_whole(tmp_path: Path) -> None:
    async def main() -> None:
        async with gates(tmp_path, "a") as machines:
            transport = MachineTransport(machines)
            a = Replica("a:replica-0", "", "a")
            await transport.bring([a], HALF, 1)
            for file in transport.place(a, 1).glob("*.safetensors"):
                file.write_bytes(bytes(len(file.read_bytes())))
            assert await transport.bring([a], {name: value + 1 for name, value in HALF.items()}, 2) == {}
            await transport.aclose()
            assert torch.equal(weights_in(transport.place(a, 2))["w1"], HALF["w1"] + 1)

    asyncio.run(main())


@pytest.mark.parametrize(("whole", "by_changes", "expected"), [(1.0, 2.0, False), (2.0, 1.0, True)])
def test_the_faster_way_is_kept_and_the_other_tried_now_and_then(
    whole: float, by_changes: float, expected: bool
) -> None:
    changes, taken = _Changes(), []
    for version in range(40):
        changes.begin(version, 8)
        bucket = changes.added(_Bucket("file", ("w",), bytes([version] * 8), str(version)))
        taken.append(bool(bucket.before))
        changes.sent(by_changes if taken[-1] else whole)
    assert taken[:2] == [False, True]
    others = [version for version, by in enumerate(taken) if version > 1 and by != expected]
    assert len(others) in (4, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_passed_on_from_machine_to_machine(dtype: torch.dtype, tmp_path: Path) -> None:
    """Whole, and then by what has changed."""
    weights = {name: torch.randn(2**14).to(dtype) for name in WEIGHTS}

    async def main() -> None:
        async with gates(tmp_path, "a", "b", "c", chain=True) as machines:
            transport = MachineTransport(machines)
            replicas = [Replica(f"{name}:replica-0", "", name) for name in "abc"]
            for version in (1, 2):
                weights["w3"][7] += 1
                assert await transport.bring(replicas, weights, version) == {}
                assert set(transport.brought) == set("abc")
                for replica in replicas:
                    there = weights_in(transport.place(replica, version))
                    assert len(there) == 6 and all(torch.equal(value, weights[key]) for key, value in there.items())
            await transport.aclose()
            assert (transport.brought["c"].bytes < 10_000) == (dtype == torch.bfloat16)

    asyncio.run(main())


def test_one_that_is_lost_below_takes_those_behind_it_along_and_nobody_else(tmp_path: Path) -> None:
    async def main() -> None:
        async with gates(tmp_path, "a", "b", "c", chain=True) as machines:
            machines.there["a"] = replace(machines.there["a"], reaches=("gone", "b"))
            machines.there["gone"] = EngineMachine("gone", 0, tmp_path / "gone", "", ("behind",))
            machines.there["behind"] = EngineMachine("behind", 0, tmp_path / "behind")
            with anyio.fail_after(30):
                transport, problems = await bring(machines)
            lost = {name.partition(":")[0] for name in problems}
            assert lost == {"gone", "behind"} and set(transport.brought) == set("abc")
            assert "gone takes no weights: it is not connected" in str(problems["behind:replica-0"])
            assert weights_in(tmp_path / "c" / "version-1").keys() == WEIGHTS.keys()

    asyncio.run(main())


def test_what_was_damaged_on_its_way_to_the_last_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, spoilt = gate_module.weight_files.File.take, []

    def spoil(self: Any, piece: bytes) -> None:
        if "/c/" not in str(self._place) or spoilt:
            return real(self, piece)
        spoilt.append(True)
        return real(self, bytes(len(piece)))

    monkeypatch.setattr(gate_module.weight_files.File, "take", spoil)

    async def main() -> None:
        async with gates(tmp_path, "a", "b", "c", chain=True) as machines:
            with anyio.fail_after(30):
                _, problems = await bring(machines)
            assert problems == {} and spoilt

    asyncio.run(main())
    assert torch.equal(weights_in(tmp_path / "c" / "version-1")["w1"], WEIGHTS["w1"])


@given(st.dictionaries(st.sampled_from("abcdef"), st.lists(st.sampled_from("abcdef"), unique=True, max_size=4)))
def test_every_machine_is_in_one_place_of_one_tree(reaches: dict[str, list[str]]) -> None:
    found = trees("abcde", reaches)
    assert sorted(names_in(found)) == list("abcde")
    for name, below in found.items():
        assert set(below) <= set(reaches.get(name, []))
