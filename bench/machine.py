"""The machine of a reading, which is part of every result."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from importlib import metadata
from pathlib import Path

import numpy as np

from bench.baselines.echo import Echo
from bench.measure import seconds

PACKAGES = ("jax", "jaxlib", "numpy", "pyzmq", "ray", "xoscar")
ROUND_TRIPS = 500
COPIES = 9
COPIED_BYTES = 64 << 20


def describe() -> dict[str, object]:
    """Processor, cores, memory, kernel, versions, the commit and the day, for the JSON of a result."""
    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "commit": _commit(),
        "day": time.strftime("%Y-%m-%d"),
    }


def units() -> dict[str, float]:
    """What readings are made of: microseconds of a bare zmq round trip, GB/s of a copy in memory (medians)."""
    with Echo() as echo:
        trips = [seconds(echo.round_trip) for _ in range(ROUND_TRIPS)]
    source = np.ones(COPIED_BYTES, np.uint8)
    target = np.empty_like(source)
    copies = [seconds(lambda: np.copyto(target, source)) for _ in range(COPIES)]
    return {
        "zmq_round_trip_us": round(1e6 * statistics.median(trips), 1),
        "memcpy_gb_s": round(COPIED_BYTES / statistics.median(copies) / 1e9, 2),
    }


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load() -> tuple[float, float, float]:
    """The machine's load over the last 1, 5 and 15 minutes, which shows other programs."""
    one, five, fifteen = os.getloadavg()
    return round(one, 2), round(five, 2), round(fifteen, 2)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """The commit, with a plus sign if files were changed; "unknown" outside of a clone."""
    here = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=here, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
