"""How busy the leased GPUs are, as their driver reports it through NVML.

Decision: nothing samples in the background. The driver keeps samples of the last seconds and counts the energy, so a
question at the end of a step is about the whole step.

Values that a GPU does not report are left out: a MIG slice reports its memory and not its utilisation.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from types import ModuleType
from typing import Any

from rollouts_core.memory import GIB

PERCENT = 100
MILLI = 1000


class GPUWatch:
    """The GPUs that this process may use; none where there is no driver."""

    def __init__(self) -> None:
        self._gpus = [_GPU(nvml, handle, whole) for nvml, handle, whole in _handles()]

    def metrics(self) -> dict[str, float]:
        """Since the last call: `gpu/utilization` (share of the time, mean over GPUs) and `gpu/power_w` (mean); now:
        `gpu/memory_gib` and `gpu/temperature_c` (of the GPU with most)."""
        told: dict[str, float] = {}
        for name, (ask, together) in READINGS.items():
            values = [value for gpu in self._gpus if (value := ask(gpu)) is not None]
            if values:
                told[f"gpu/{name}"] = together(values)
        return told


@dataclass
class _GPU:
    nvml: ModuleType
    handle: Any
    whole: Any
    """The GPU that a MIG slice is cut from; else the GPU itself."""
    _seen: int = 0
    """Time of the driver's last sample, in microseconds."""
    _energy: tuple[float, int] | None = None
    """When, in seconds, and how much, in millijoules."""

    def utilization(self) -> float | None:
        with suppress(self.nvml.NVMLError):
            _, samples = self.nvml.nvmlDeviceGetSamples(self.handle, self.nvml.NVML_GPU_UTILIZATION_SAMPLES, self._seen)
            if samples:
                self._seen = max(sample.timeStamp for sample in samples)
                return fmean(sample.sampleValue.uiVal / PERCENT for sample in samples)
        return None

    def power_w(self) -> float | None:
        """The mean power since the last call, if the driver counts energy; otherwise, and in the first call, the power
        now."""
        with suppress(self.nvml.NVMLError):
            now, before = (time.monotonic(), self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.whole)), self._energy
            self._energy = now
            if before is not None and now[0] > before[0]:
                return float((now[1] - before[1]) / MILLI / (now[0] - before[0]))
        with suppress(self.nvml.NVMLError):
            return float(self.nvml.nvmlDeviceGetPowerUsage(self.whole) / MILLI)
        return None

    def memory_gib(self) -> float | None:
        with suppress(self.nvml.NVMLError):
            return float(self.nvml.nvmlDeviceGetMemoryInfo(self.handle).used / GIB)
        return None

    def temperature_c(self) -> float | None:
        with suppress(self.nvml.NVMLError):
            return float(self.nvml.nvmlDeviceGetTemperature(self.whole, self.nvml.NVML_TEMPERATURE_GPU))
        return None


READINGS: dict[str, tuple[Callable[[_GPU], float | None], Callable[[Sequence[float]], float]]] = {
    "utilization": (_GPU.utilization, fmean),
    "power_w": (_GPU.power_w, fmean),
    "memory_gib": (_GPU.memory_gib, max),
    "temperature_c": (_GPU.temperature_c, max),
}
"""How each is asked, and what is told of several GPUs."""


def _handles() -> list[tuple[ModuleType, Any, Any]]:
    try:
        import pynvml
    except ImportError:  # nvidia-ml-py is not installed on this machine
        return []
    try:
        pynvml.nvmlInit()
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(place) for place in range(pynvml.nvmlDeviceGetCount())] if named is None else named.split(",")
        return [(pynvml, *_handle(pynvml, name.strip())) for name in names if name.strip()]
    except pynvml.NVMLError:
        return []


def _handle(nvml: ModuleType, name: str) -> tuple[Any, Any]:
    """A GPU's handle, by its UUID or place. For a MIG slice also that of its GPU."""
    if name.isdigit():
        handle = nvml.nvmlDeviceGetHandleByIndex(int(name))
        return handle, handle
    handle = nvml.nvmlDeviceGetHandleByUUID(name)
    return handle, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if name.startswith("MIG-") else handle
