"""Runs the user's script as a child process."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
PR_SET_PDEATHSIG = 1


def run_script(
    command: Sequence[str],
    address: str,
    environment: Mapping[str, str] = {},
) -> int:
    """Run `command` with PW_ADDRESS set; returns its exit code, 128 + n if signal n ended it.

    At a terminal the script shares this process's group, so the terminal sends Ctrl-C to both, and this process
    ignores it. Otherwise the script has a group of its own, and this process passes its signals on. If this
    process is killed, the script gets SIGTERM (on Linux).
    """
    at_terminal = _in_foreground()
    pending: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        if at_terminal and number in FROM_TERMINAL:
            return
        if child is None:
            pending.append(number)
        elif child.returncode is None:
            child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    try:
        child = subprocess.Popen(
            command,
            env={**os.environ, "PW_ADDRESS": address, **environment},
            process_group=None if at_terminal else 0,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        for number in pending:
            child.send_signal(number)
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def _end_with_parent() -> None:
    """Runs in the child before it becomes the script; this process has one thread by now."""
    assert _prctl is not None
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
