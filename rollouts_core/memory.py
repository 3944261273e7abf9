"""How much memory there is."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GIB = 2**30
GROUP_LIMIT, GROUP_USE = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def free_bytes(device: "torch.device") -> int:
    """Free memory: of a GPU, what no process holds; of this machine, what a process may still take within its
    container's limit.

    The largest number there is where the system doesn't say.
    """
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return min(_available(), _left_in_container())


def begin_peak(device: str) -> None:
    """Begin a measurement: `peak_bytes` is the largest use of memory since this call."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats()
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: str) -> int:
    """The most that this process has held since `begin_peak`: on the GPU, or of this machine's memory. 0 where the
    system does not say."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.max_memory_allocated())
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def machine_bytes() -> int:
    """Bytes of this machine's memory, or of its container's limit."""
    try:
        return min(_of_system("MemTotal"), int(GROUP_LIMIT.read_text()))
    except (OSError, ValueError):
        return _of_system("MemTotal")


def _available() -> int:
    return _of_system("MemAvailable")


def _of_system(name: str) -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 2**63
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _left_in_container() -> int:
    try:
        return int(GROUP_LIMIT.read_text()) - int(GROUP_USE.read_text())
    except (OSError, ValueError):  # no such group, or "max"
        return 2**63
