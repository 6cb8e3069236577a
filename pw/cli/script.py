"""Runs the user's script as a child process."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from types import FrameType

from pw.processes.forking import end_with_parent

PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)


def run_script(command: Sequence[str], address: str, environment: Mapping[str, str] = {}) -> int:
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
            # In the child before it becomes the script; this process has one thread by now.
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
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
