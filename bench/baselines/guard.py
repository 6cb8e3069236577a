"""Kills the processes of a contender when the benchmark that started them has ended.

A contender that is stopped (SIGSTOP) cannot notice that end. The benchmark holds the other end of
this process's standard input.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from bench.processor import processes


def members(leaders: set[int]) -> list[int]:
    """All processes of the sessions with these leaders."""
    return [pid for pid, fields in processes().items() if int(fields[3]) in leaders]


def main() -> None:
    """Wait for the end of standard input, then kill the sessions of the given leaders."""
    sys.stdin.read()
    for pid in members({int(leader) for leader in sys.argv[1:]}):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
