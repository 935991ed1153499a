"""What this machine has: cores that the process may use, and the instructions of its CPU."""

from __future__ import annotations

import math
import os
import platform
from functools import cache
from pathlib import Path

from graft.base.errors import TooManyThreads, UsageError

THREADS = "GRAFT_NUM_THREADS"


def available_cores() -> int:
    """Physical cores among those that the process may run on; two threads of one core share its memory port."""
    affinity = getattr(os, "sched_getaffinity", None)
    if affinity is None:
        return os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    return allowed(quota.read_text() if quota.exists() else "", len({siblings(cpu) for cpu in affinity(0)}))


def allowed(quota: str, cores: int) -> int:
    """Of so many cores, those that a container's quota pays for: `150000 100000` is 1.5 of them, `max …` all."""
    if not quota or quota.startswith("max"):
        return cores
    time, period = map(int, quota.split())
    return min(cores, math.ceil(time / period))


def siblings(cpu: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return path.read_text().strip() if path.exists() else str(cpu)


def thread_count() -> int:
    """GRAFT_NUM_THREADS, or every core that the process may use."""
    cores, given = available_cores(), os.environ.get(THREADS)
    if not given:
        return cores
    if not given.isdigit() or int(given) < 1:
        raise UsageError(f"{THREADS} is {given!r}; give the number of threads, 1 to {cores}")
    if int(given) > cores:
        raise TooManyThreads(int(given), cores)
    return int(given)


@cache
def cpu_features() -> str:
    """Machine, model and instruction set, as far as the system tells: what compiled code may depend on."""
    info = Path("/proc/cpuinfo")
    kept = ("flags", "Features", "model name", "CPU implementer", "CPU part", "CPU variant")
    lines = (
        {line.strip() for line in info.read_text().splitlines() if line.startswith(kept)} if info.exists() else set()
    )
    name = "" if info.exists() else platform.processor()  # on Linux it would start a program
    return "\n".join([platform.machine(), platform.system(), name, *sorted(lines)])


@cache
def multiplies_halves() -> bool:
    """Whether the CPU has products of float16; on ARM since 2017, and then twice as many at once as of float32."""
    return (platform.machine(), platform.system()) == ("arm64", "Darwin") or "asimdhp" in cpu_features().split()
