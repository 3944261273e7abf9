"""How much memory there is."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GIB = 2**30
GROUP_LIMIT, GROUP_USE = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def free_bytes(device: "torch.device") -> int:
    """Of a GPU, what no process holds; of this machine, what a process may still take, its container's limit counted.

    The largest number there is where the system doesn't say.
    """
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return min(_available(), _left_in_container())


def _available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 2**63
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kibibytes) * 1024


def _left_in_container() -> int:
    try:
        return int(GROUP_LIMIT.read_text()) - int(GROUP_USE.read_text())
    except (OSError, ValueError):  # no such group, or "max"
        return 2**63
