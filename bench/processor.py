"""How much processor time processes have used: what others on the machine can hardly falsify."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path


def busy_s(roots: Iterable[int]) -> float:
    """Processor time, in seconds, that these processes and their living descendants have used so far.

    It grows in steps of ten milliseconds, and is 0 where there is no /proc.
    """
    used: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            # The name, in parentheses, may have spaces in it; the state is the first field after it.
            fields = stat.read_text().rpartition(")")[2].split()
            pid = int(stat.parent.name)
            used[pid] = int(fields[11]) + int(fields[12])
            children.setdefault(int(fields[1]), []).append(pid)
    ticks, waiting = 0, list(roots)
    while waiting:
        pid = waiting.pop()
        ticks += used.get(pid, 0)
        waiting += children.get(pid, [])
    return ticks / os.sysconf("SC_CLK_TCK")
