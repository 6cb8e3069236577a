"""Daemons as child processes of this one, which never outlive it.

Each child inherits the reading end of a pipe whose writing end only this process holds: when this
process ends, however it ends, the child sees the end of the file and stops. Children are in sessions of
their own, so that a Ctrl-C at the terminal is the user's script's alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from pw.core.errors import ConnectionFailed

STOP_S = 3.0
_CPU_SETTINGS = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS", "PJRT_NPROC", "NPROC")


class Child:
    """One daemon of `pw.cli`, started with `arguments`."""

    def __init__(self, module: str, arguments: Sequence[str], pass_fds: Sequence[int] = ()) -> None:
        self.module = module
        parent_read, self._parent_write = os.pipe()
        environment = {k: v for k, v in os.environ.items() if k not in _CPU_SETTINGS}
        environment.pop("PW_ADDRESS", None)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments, "--parent-fd", str(parent_read)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[parent_read, *pass_fds],
                env=environment,
            )
        except BaseException:
            os.close(self._parent_write)
            raise
        finally:
            os.close(parent_read)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """Ask it to end."""
        if self._parent_write >= 0:
            os.close(self._parent_write)
            self._parent_write = -1
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """End it and reap it. Idempotent."""
        self.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def read_announcement(child: Child, announcement: int, timeout_s: float) -> str:
    """The line a daemon writes to the pipe `announcement` when it is ready.

    Raises ConnectionFailed if it ends, or takes longer than `timeout_s`.
    """
    import select

    text = b""
    with os.fdopen(announcement, "rb", buffering=0) as pipe:
        while not text.endswith(b"\n"):
            if not select.select([pipe], [], [], timeout_s)[0]:
                raise ConnectionFailed(f"{child.module} was not ready within {timeout_s:.0f} s")
            chunk = pipe.read(1024)
            if not chunk:
                child.stop()
                raise ConnectionFailed(
                    f"{child.module} ended with exit code {child.exit_code()} before it was ready; "
                    "its error is above"
                )
            text += chunk
    return text.decode().strip()
