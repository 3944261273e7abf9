"""What is asked of NVML and told of it. The driver is a stand-in, below pynvml, where the C library is otherwise."""

import ctypes
from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from rollouts_core.metrics import gpus
from rollouts_core.metrics.gpus import GPUWatch

NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
GIB = 2**30


class Driver:
    """Two GPUs, and a slice of the first. Fits what pynvml calls of the library."""

    def __init__(self) -> None:
        self.samples = {0: [(100, 50), (200, 100)], 1: [(100, 0), (200, 10)]}
        """Of each GPU: microseconds and per cent."""
        self.millijoules = {0: 1_000_000, 1: 5_000_000}
        self.counts_energy = True
        self.uuids = {b"GPU-aaaa": 0, b"GPU-bbbb": 1, b"MIG-1111": 100}

    def nvmlInitWithFlags(self, flags: int) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        if index.value not in (0, 1):
            return int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._give(handle, index.value)

    def nvmlDeviceGetHandleByUUID(self, uuid: Any, handle: Any) -> int:
        return self._give(handle, self.uuids[uuid.value])

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, mig: Any, handle: Any) -> int:
        return self._give(handle, number(mig) - 100)

    def nvmlDeviceGetSamples(self, handle: Any, kind: Any, since: Any, value: Any, count: Any, array: Any) -> int:
        if number(handle) >= 100:
            return NOT_SUPPORTED
        fresh = [sample for sample in self.samples[number(handle)] if sample[0] > since.value]
        if not fresh:
            return int(pynvml.NVML_ERROR_NOT_FOUND)
        count._obj.value = len(fresh)
        for place, (stamp, percent) in enumerate(fresh) if array is not None else ():
            array[place].timeStamp, array[place].sampleValue.uiVal = stamp, percent
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, info: Any) -> int:
        info._obj.used = 4 * GIB if number(handle) >= 100 else (1 + 9 * number(handle)) * GIB
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, energy: Any) -> int:
        if not self.counts_energy:
            return NOT_SUPPORTED
        energy._obj.value = self.millijoules[number(handle)]
        return 0

    def nvmlDeviceGetPowerUsage(self, handle: Any, power: Any) -> int:
        power._obj.value = 70_000
        return 0

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: Any, temperature: Any) -> int:
        if number(handle) >= 100:
            return NOT_SUPPORTED
        temperature._obj.value = 40 + number(handle)
        return 0

    @staticmethod
    def _give(handle: Any, value: int) -> int:
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = ctypes.c_void_p(value + 1)
        return 0


def number(handle: Any) -> int:
    """Of the GPU; a null pointer would be none, so they begin at one."""
    return int(ctypes.cast(handle, ctypes.c_void_p).value or 0) - 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(pynvml, "nvmlLib", driver)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "_LoadNvmlLibrary", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return driver


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [0.0]
    monkeypatch.setattr(gpus.time, "monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, seconds)


def test_a_step_tells_of_all_that_happened_since_the_last(driver: Driver, clock: Callable[[float], None]) -> None:
    watch = GPUWatch()
    first = watch.metrics()
    assert first == {
        "gpu/utilization": pytest.approx((0.75 + 0.05) / 2), "gpu/power_w": 70.0, "gpu/memory_gib": 10.0,
        "gpu/temperature_c": 41.0,
    }  # fmt: skip
    clock(2.0)
    driver.samples[0].append((300, 30))
    driver.millijoules = {0: 1_600_000, 1: 5_200_000}
    second = watch.metrics()
    assert second["gpu/utilization"] == pytest.approx(0.3)  # the other has nothing new
    assert second["gpu/power_w"] == pytest.approx((300 + 100) / 2)


@pytest.mark.parametrize(("visible", "memory"), [("1", 10.0), ("GPU-aaaa", 1.0), ("GPU-aaaa,GPU-bbbb", 10.0)])
def test_only_leased_gpus_are_asked(
    visible: str, memory: float, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert GPUWatch().metrics()["gpu/memory_gib"] == memory


def test_a_slice_tells_what_it_knows_and_its_gpu_the_rest(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1111")
    assert GPUWatch().metrics() == {"gpu/power_w": 70.0, "gpu/memory_gib": 4.0, "gpu/temperature_c": 40.0}


def test_power_is_what_is_drawn_where_energy_is_not_counted(driver: Driver, clock: Callable[[float], None]) -> None:
    driver.counts_energy = False
    watch = GPUWatch()
    watch.metrics()
    clock(2.0)
    assert watch.metrics()["gpu/power_w"] == 70.0


@pytest.mark.parametrize("visible", ["7", "", "no-such-gpu"])
def test_what_is_not_there_is_not_told(visible: str, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.uuids[b"no-such-gpu"] = -1
    monkeypatch.setattr(driver, "nvmlDeviceGetHandleByUUID", lambda uuid, handle: int(pynvml.NVML_ERROR_NOT_FOUND))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert GPUWatch().metrics() == {}


def test_without_a_driver_nothing_is_told() -> None:
    assert GPUWatch().metrics() == {}
