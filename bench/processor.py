"""The processes of this machine, their processor time, which other load hardly changes, and memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path


def processes() -> dict[int, list[str]]:
    """For each process the fields of its `stat` after the name: state, parent, group, session, ...

    Empty where there is no /proc.
    """
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            # The name, in parentheses, may contain spaces.
            found[int(stat.parent.name)] = stat.read_text().rpartition(")")[2].split()
    return found


def busy_s(roots: Iterable[int]) -> float:
    """Processor time, in seconds, of these processes and their living descendants so far.

    It grows in steps of ten milliseconds, and is 0 where there is no /proc.
    """
    found = processes()
    ticks = sum(int(found[pid][11]) + int(found[pid][12]) for pid in descendants(roots, found))
    return ticks / os.sysconf("SC_CLK_TCK")


def resident_bytes(roots: Iterable[int]) -> int:
    """Memory that these processes and their living descendants use now; 0 where there is no /proc."""
    found = processes()
    pages = sum(int(found[pid][21]) for pid in descendants(roots, found))
    return pages * os.sysconf("SC_PAGE_SIZE")


def descendants(roots: Iterable[int], found: dict[int, list[str]]) -> list[int]:
    """Return these processes, if they live, and their descendants; `found` is from `processes`."""
    children: dict[int, list[int]] = {}
    for pid, fields in found.items():
        children.setdefault(int(fields[1]), []).append(pid)
    every, left = [], [pid for pid in roots if pid in found]
    while left:
        pid = left.pop()
        every.append(pid)
        left += children.get(pid, [])
    return every


def client_and_cluster_s(pids: Iterable[int]) -> float:
    """Processor time, in seconds, of this process and of a cluster's processes so far."""
    return time.process_time() + busy_s(pids)
