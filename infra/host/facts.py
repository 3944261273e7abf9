"""A report of a host's facts. The caller judges them."""

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

QUERY = "index,uuid,name,memory.total,driver_version,mig.mode.current"
NVIDIA_SMI = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
USE = "index,utilization.gpu,memory.used,power.draw,temperature.gpu"
NVIDIA_SMI_USE = ["nvidia-smi", f"--query-gpu={USE}", "--format=csv,noheader,nounits"]
GPU_LINE = re.compile(r"GPU \d+: .*\(UUID: (?P<uuid>GPU-[^)]+)\)")
MIG_LINE = re.compile(r"\s+MIG (?P<profile>\S*?(?P<gb>\d+)gb\S*)\s+Device\s+\d+: \(UUID: (?P<uuid>MIG-[^)]+)\)")
DEADLINE = 20.0


def facts(work: Path) -> dict[str, Any]:
    """Python, platform, processors, memory (bytes), disk (bytes), GPUs (MiB), the clock (seconds since 1970)."""
    return {
        "python": platform.python_version(),
        "interpreter": sys.executable,
        "platform": f"{platform.system()} {platform.machine()} {'-'.join(platform.libc_ver())}",
        "cpus": os.cpu_count(),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "disk_free": shutil.disk_usage(work).free,
        "work": str(work),
        "gpus": gpus(),
        "uv": shutil.which("uv"),
        "clock": time.time(),
    }


def gpus() -> list[dict[str, Any]]:
    """The GPUs that the driver lists, or the MIG slices of a divided one: place, UUID, model,
    memory in MiB, driver version. Empty without a driver."""
    rows = [[field.strip() for field in line.split(",")] for line in _asked(NVIDIA_SMI).splitlines()]
    rows = [row for row in rows if len(row) == 6 and row[0].isdigit() and row[3].isdigit()]
    slices = slices_of(_asked(["nvidia-smi", "-L"])) if any(row[5] == "Enabled" for row in rows) else {}
    found: list[dict[str, Any]] = []
    for _, uuid, model, memory, driver, _ in rows:
        cut = slices.get(uuid) or [(uuid, "", int(memory))]
        found += [
            {"index": len(found) + place, "uuid": own, "model": f"{model} {profile}".strip(), "memory": mib,
             "driver": driver}
            for place, (own, profile, mib) in enumerate(cut)
        ]  # fmt: skip
    return found


def gpu_use() -> list[dict[str, Any]]:
    """The use of the GPUs that the driver lists: place, share of the last second that it worked, memory in use (MiB),
    power (W), temperature (°C); None for what the driver does not report."""
    rows = [[field.strip() for field in line.split(",")] for line in _asked(NVIDIA_SMI_USE).splitlines()]
    return [
        {"index": int(row[0]), "utilization": _percent(row[1]), "memory_used": _number(row[2]),
         "power": _number(row[3]), "temperature": _number(row[4])}
        for row in rows if len(row) == 5 and row[0].isdigit()
    ]  # fmt: skip


def visible(places: Iterable[int], there: Sequence[Mapping[str, Any]]) -> str:
    """`CUDA_VISIBLE_DEVICES` for these places. CUDA counts by speed and the driver by slot, so it is by UUID where the
    driver tells them."""
    known = {gpu["index"]: str(gpu["uuid"]) for gpu in there}
    return ",".join(known.get(place, str(place)) for place in places)


def slices_of(listing: str) -> dict[str, list[tuple[str, str, int]]]:
    """The MIG slices of each GPU's UUID in the output of `nvidia-smi -L`, as UUID, profile and MiB."""
    found: dict[str, list[tuple[str, str, int]]] = {}
    whole = ""
    for line in listing.splitlines():
        if match := GPU_LINE.match(line):
            whole = match["uuid"]
        elif match := MIG_LINE.match(line):
            slice_ = (match["uuid"], f"MIG {match['profile']}", int(match["gb"]) * 1024)
            found.setdefault(whole, []).append(slice_)
    return found


def _percent(said: str) -> float | None:
    number = _number(said)
    return None if number is None else number / 100


def _number(said: str) -> float | None:
    """`[N/A]` and the like are none."""
    try:
        return float(said)
    except ValueError:
        return None


def _asked(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
