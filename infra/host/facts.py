"""What a host is: reported as it finds it, judged by whoever asks."""

import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NVIDIA_SMI = ["nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader,nounits"]
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
    """Of every GPU that the driver names: index, model, memory in MiB, driver version. None without a driver."""
    try:
        done = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=DEADLINE, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines()]
    return [
        {"index": int(row[0]), "model": row[1], "memory": int(row[2]), "driver": row[3]}
        for row in rows
        if len(row) == 4 and row[0].isdigit() and row[2].isdigit()
    ]
