"""How new weights reach SGLang's replicas: by files, by shared tensors, or by broadcast. The result is the same.

    DiskTransport        safetensors in a directory, in memory where there is one, read by each replica
    MachineTransport     the same, sent to each machine that has replicas (see `machine_transport`)
    TensorTransport      the tensors themselves, shared within the host: CUDA's own handles, or shared memory
    BroadcastTransport   one broadcast a bucket over NCCL (gloo on the CPU), for replicas on other GPUs

Decision: weights are sent in buckets of up to 1 GiB, never with a call for each parameter. With hundreds of small
calls, HTTP takes most of the time (open-instruct: 120 s of calls for 0.5 s of NCCL).

Decision: SGLang accepts shared tensors only as pickles. We pickle a list of names and torch's handles of shared
tensors, for our own server over the loopback. Nothing pickled is ever read here.
"""

import base64
import errno
import io
import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Protocol

import anyio
import torch
import torch.distributed as dist
import torch.multiprocessing
from anyio import to_thread
from safetensors import SafetensorError
from safetensors.torch import save_file

from rollouts_core.concurrency import first_error
from rollouts_core.errors import EngineError, EngineRefused, EngineUnavailable, WeightMismatch
from rollouts_core.inference.http import JsonClient
from rollouts_core.inference.members import Problems, for_each
from rollouts_core.inference.replicas import Fleet, Replica
from rollouts_core.inference.weight_group import join, leave
from rollouts_core.network import own_address, use_interface_towards

BUCKET_BYTES = 2**30
ANSWER_SECONDS = 5.0
SECONDS = 600.0
"""Deadline of a whole transfer, and of each call in it."""

INDEX = "model.safetensors.index.json"

Weights = Mapping[str, torch.Tensor]


class WeightTransport(Protocol):
    """A way to bring weights to replicas. `bring` and `swap` return the replicas that failed, with the reasons."""

    async def bring(self, replicas: Sequence[Replica], weights: Weights, version: int) -> Problems:
        """Bring weights as near to replicas as can be done while they generate."""

    async def swap(self, replicas: Sequence[Replica], weights: Weights, version: int) -> Problems:
        """Give paused replicas what was brought. The weights of those that fail are to be thrown away."""

    @property
    def brought(self) -> "Mapping[str, Brought]":
        """The bytes and seconds of the last version's transfer, by the name of each other machine."""

    async def aclose(self) -> None: ...


@dataclass(frozen=True)
class Brought:
    """The bytes that were sent to a machine, and the seconds that took."""

    bytes: int
    seconds: float


NOTHING: Mapping[str, Brought] = {}


class FileTransport(WeightTransport, Protocol):
    """Replicas read the weights from files, so those of any engine can."""

    def place(self, replica: Replica, version: int) -> Path:
        """The directory from which a replica reads a version that was brought."""


def buckets(weights: Weights, limit: int = BUCKET_BYTES) -> Iterator[dict[str, torch.Tensor]]:
    """The weights in order, cut where `limit` bytes would be exceeded; a larger tensor is a bucket of its own."""
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights.items():
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket


def file_name(bucket: int) -> str:
    """The name of a bucket's safetensors file, as transformers names the files of a model."""
    return f"model-{bucket:05d}.safetensors"


def index_text(files: Mapping[str, str]) -> str:
    """The text of `INDEX`: the file of each weight, as transformers writes it."""
    return json.dumps({"weight_map": files})


async def load_checkpoint(
    http: JsonClient, replicas: Sequence[Replica], place: Callable[[Replica], Path], version: int
) -> Problems:
    """Make replicas load a Hugging Face model directory that they can read. Returns those that failed, with reasons."""

    async def load(replica: Replica) -> None:
        body = {
            "model_path": str(place(replica)),
            "load_format": "auto",  # the server may have begun with another format
            "weight_version": str(version),
            "flush_cache": True,
        }
        try:
            await _post(http, "/update_weights_from_disk", body, replica)
        except EngineRefused as error:
            raise WeightMismatch(f"weight version {version} is refused by {replica.name}: {error}") from None

    return await for_each(replicas, load)


class DiskTransport:
    """Writes a version below `directory`, has it read, and removes the one before. Raises OSError when it is full."""

    brought = NOTHING

    def __init__(self, directory: Path, limit: int = BUCKET_BYTES) -> None:
        self._directory, self._limit = directory, limit
        self._http = JsonClient()

    async def bring(self, replicas: Sequence[Replica], weights: Weights, version: int) -> Problems:
        await to_thread.run_sync(partial(self._write, self._place(version), weights))
        return {}

    async def swap(self, replicas: Sequence[Replica], weights: Weights, version: int) -> Problems:
        return await load_checkpoint(self._http, replicas, partial(self.place, version=version), version)

    def place(self, replica: Replica, version: int) -> Path:
        return self._place(version)

    def _place(self, version: int) -> Path:
        return self._directory / f"version-{version}"

    async def aclose(self) -> None:
        await self._http.aclose()

    def _write(self, place: Path, weights: Weights) -> None:
        if place.exists():
            return
        for old in self._directory.glob("version-*"):
            shutil.rmtree(old, ignore_errors=True)
        unfinished = self._directory / f".{place.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        try:
            index: dict[str, str] = {}
            for number, bucket in enumerate(buckets(weights, self._limit)):
                file = file_name(number)
                save_file({name: tensor.detach().contiguous() for name, tensor in bucket.items()}, unfinished / file)
                index |= dict.fromkeys(bucket, file)
            (unfinished / INDEX).write_text(index_text(index))
            unfinished.rename(place)
        except (OSError, SafetensorError) as error:
            if "No space left" not in str(error):
                raise
            raise OSError(errno.ENOSPC, "No space left on device", str(self._directory)) from None
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


class TensorTransport:
    """Shares tensors with replicas on this host; on CUDA without a copy, on the CPU by one into shared memory."""

    brought = NOTHING

    def __init__(self, tensor_parallel: int = 1, limit: int = BUCKET_BYTES) -> None:
        self._ranks, self._limit = tensor_parallel, limit
        self._http = JsonClient()

    async def bring(self, replicas: Sequence[Replica], weights: Weights, version: int) -> Problems:
        return {}

    async def swap(self, replicas: Sequence[Replica], weights: Weights, version: int) -> Problems:
        torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]  # handed-over descriptors end a server's process

        problems: Problems = {}

        async def tell(path: str, body: Callable[[], Any]) -> None:
            async def post(replica: Replica) -> None:
                await _post(self._http, path, body(), replica)

            there = [replica for replica in replicas if replica.name not in problems]
            problems.update(await for_each(there, post))

        await tell("/begin_weight_update", dict)
        for bucket in buckets(weights, self._limit):
            shared = [(name, _shared(tensor)) for name, tensor in bucket.items()]
            await tell("/update_weights_from_tensor", partial(self._handed, shared, version))
        await tell("/end_weight_update", dict)
        return problems

    def _handed(self, shared: list[tuple[str, torch.Tensor]], version: int) -> dict[str, Any]:
        """Handles of shared tensors are counted: each replica gets its own."""
        return {"serialized_named_tensors": [_pickled(shared)] * self._ranks, "weight_version": str(version)}

    async def aclose(self) -> None:
        await self._http.aclose()


class BroadcastTransport:
    """A broadcast in a process group of the trainer (rank 0) and all ranks of all replicas. It is made anew when the
    replicas change.

    Replicas on other machines meet the trainer at its address on the network that leads to them. When one of them is
    lost on the way, the others are given the weights once more, without it.
    """

    def __init__(self, fleet: Fleet, tensor_parallel: int = 1, limit: int = BUCKET_BYTES) -> None:
        self._fleet, self._ranks, self._limit = fleet, tensor_parallel, limit
        self.brought: Mapping[str, Brought] = {}
        self._http = JsonClient()
        self._members: tuple[str, ...] = ()
        self._group: Any = None
        self._made = 0

    async def bring(self, replicas: Sequence[Replica], weights: Weights, version: int) -> Problems:
        return {}

    async def swap(self, replicas: Sequence[Replica], weights: Weights, version: int) -> Problems:
        self.brought = {}
        problems: Problems = {}
        for _ in range(2):
            there = [replica for replica in replicas if replica.name not in problems]
            failed = await self._try(there, weights, version) if there else ""
            if not failed:
                return problems
            lost = await for_each(there, self._answers)
            problems |= lost
            if not lost:
                break
        return problems | {replica.name: EngineUnavailable(failed) for replica in replicas}

    async def _try(self, replicas: Sequence[Replica], weights: Weights, version: int) -> str:
        """Broadcast the weights once. Returns the error as text; empty if it worked."""
        device = next(iter(weights.values())).device
        began = time.perf_counter()
        try:
            with first_error(), anyio.fail_after(SECONDS):
                await self._meet(replicas, "nccl" if device.type == "cuda" else "gloo")
                sent = await self._broadcast(replicas, weights, version)
        except (EngineError, RuntimeError, TimeoutError) as error:
            await self._part()
            return f"broadcast failed: {error}"
        told = Brought(sent, time.perf_counter() - began)
        self.brought = {replica.machine: told for replica in replicas if replica.machine}
        return ""

    async def _answers(self, replica: Replica) -> None:
        await self._http.call("GET", f"{replica.url}/model_info", deadline=ANSWER_SECONDS)

    async def aclose(self) -> None:
        self._leave()
        await self._http.aclose()

    async def _broadcast(self, replicas: Sequence[Replica], weights: Weights, version: int) -> int:
        """Returns the bytes that were sent."""
        sent = 0
        body: dict[str, Any] = {"group_name": self._name, "load_format": "flattened_bucket"}
        for replica in replicas:
            await _post(self._http, "/begin_weight_update", {}, replica)
        for bucket in buckets(weights, self._limit):
            sent += sum(tensor.nbytes for tensor in bucket.values())
            flat = torch.cat([tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in bucket.values()])
            described = {
                "names": list(bucket),
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()],
                "shapes": [list(tensor.shape) for tensor in bucket.values()],
                "weight_version": str(version),
            }
            async with anyio.create_task_group() as calls:
                for replica in replicas:
                    path = "/update_weights_from_distributed"
                    calls.start_soon(_post, self._http, path, {**body, **described}, replica)
                await to_thread.run_sync(partial(dist.broadcast, flat, src=0, group=self._group))
        for replica in replicas:
            await _post(self._http, "/end_weight_update", {}, replica)
        return sent

    @property
    def _name(self) -> str:
        return f"rollouts-weights-{self._made}"

    async def _meet(self, replicas: Sequence[Replica], backend: str) -> None:
        members = tuple(replica.url for replica in replicas)
        if members == self._members and self._group is not None:
            return
        await self._part()
        self._made += 1
        size = 1 + self._ranks * len(replicas)
        address = self._address()
        port = _free_port(address)
        async with anyio.create_task_group() as calls:
            for number, replica in enumerate(replicas):
                body = {
                    "master_address": address,
                    "master_port": port,
                    "rank_offset": 1 + number * self._ranks,
                    "world_size": size,
                    "group_name": self._name,
                    "backend": backend,
                }
                calls.start_soon(_post, self._http, "/init_weights_update_group", body, replica)
            self._group = await to_thread.run_sync(partial(join, self._name, address, port, 0, size, backend))
        self._members = members

    def _address(self) -> str:
        machines = self._fleet.ready().machines
        if not machines:
            return "127.0.0.1"
        towards = next(iter(machines.values())).address
        use_interface_towards(towards)
        return own_address(towards)

    async def _part(self) -> None:
        """Leave the group here and there; who cannot be told is gone or will be restarted."""
        if self._group is None:
            return
        path, body = "/destroy_weights_update_group", {"group_name": self._name}
        with suppress(EngineUnavailable), anyio.move_on_after(ANSWER_SECONDS):
            there = [replica for replica in self._fleet.ready().replicas if replica.url in self._members]
            await for_each(there, partial(_post, self._http, path, body))
        self._leave()

    def _leave(self) -> None:
        if self._group is not None:
            leave(self._group)
        self._group, self._members = None, ()


async def _post(http: JsonClient, path: str, body: Any, replica: Replica) -> None:
    answer = await http.call("POST", f"{replica.url}{path}", body, deadline=SECONDS)
    if isinstance(answer, dict) and answer.get("success") is False:
        raise EngineUnavailable(f"{replica.name}{path}: {answer.get('message')}")


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.is_cuda else _in_shared_memory(tensor.detach().clone())


def _in_shared_memory(tensor: torch.Tensor) -> torch.Tensor:
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor


def _pickled(value: object) -> str:
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(value)
    return base64.b64encode(buffer.getvalue()).decode()


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
