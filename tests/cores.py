"""Checks whether a process that crashes on this machine leaves a core file in its folder."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

from tests.conftest import Need


def need_cores(need: Need, folder: Path, *, megabytes: int) -> None:
    """Skip unless the kernel writes a core of that size into the process's folder, and the disk has space for it."""
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    need("core dumps", "/" not in pattern and "|" not in pattern, "kernel.core_pattern=core")
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    need("core dumps", hard == resource.RLIM_INFINITY, "ulimit -Hc unlimited")
    meminfo = Path("/proc/meminfo").read_text()
    free = int(meminfo.partition("MemAvailable:")[2].split()[0]) >> 10
    need("room for a core", free > 2 * megabytes, f"{2 * megabytes} MiB of free memory")
    left = shutil.disk_usage(folder).free >> 20
    need("room for a core", left > 2 * megabytes, f"{2 * megabytes} MiB of disk")
