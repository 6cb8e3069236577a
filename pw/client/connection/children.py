"""Daemons as child processes of this one, which never outlive it.

Each child inherits the reading end of a pipe whose writing end only this process holds: when this
process ends, however it ends, the child sees the end of the file and stops. Children are in sessions of
their own, so that a Ctrl-C at the terminal is the user's script's alone. What this process forks (it need not
exec anything) gives its copies of the writing ends back, or it would keep the daemons alive.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence

from pw.core.errors import ConnectionFailed

STOP_S = 3.0
_OWN_SETTINGS = (
    *("JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS", "PJRT_NPROC", "NPROC"),
    *("PW_ADDRESS", "PW_SECRET", "PW_SECRET_FILE"),
)
_OWN_FLAG = re.compile(r"--xla_force_host_platform_device_count=\S*")
"""What says of this process how many devices it has; all other flags are the children's as well."""


def _inherited() -> dict[str, str]:
    """This process's environment, as far as it is a child's."""
    environment = {k: v for k, v in os.environ.items() if k not in _OWN_SETTINGS}
    if "XLA_FLAGS" in environment:
        environment["XLA_FLAGS"] = _OWN_FLAG.sub("", environment["XLA_FLAGS"]).strip()
    environment["PW_OUTPUT_TO_CLIENTS_ONLY"] = "1"  # they share this process's terminal
    return environment


class Child:
    """One daemon of `pw.cli`, started with `arguments`; `environment` adds to this process's."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.module = module
        self._owner = os.getpid()
        parent_read, self._parent_write = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments, "--parent-fd", str(parent_read)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[parent_read, *pass_fds],
                env={**_inherited(), **(environment or {})},
            )
        except BaseException:
            os.close(self._parent_write)
            raise
        finally:
            os.close(parent_read)
        _children.add(self)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def let_go(self) -> None:
        """Close this process's end of the pipe."""
        if self._parent_write >= 0:
            os.close(self._parent_write)
            self._parent_write = -1

    def terminate(self) -> None:
        """Ask it to end; only the process that started it can."""
        self.let_go()
        if self._owner != os.getpid():
            return
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it without a word, and reap it."""
        self.let_go()
        if self._owner == os.getpid():
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """End it and reap it. Idempotent."""
        self.terminate()
        if self._owner != os.getpid():
            return
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_children: weakref.WeakSet[Child] = weakref.WeakSet()


def _forked() -> None:
    for child in _children:
        child.let_go()


os.register_at_fork(after_in_child=_forked)


def read_announcement(child: Child, announcement: int, timeout_s: float) -> str:
    """The line a daemon writes to the pipe `announcement` when it is ready.

    Raises ConnectionFailed if it ends, or takes longer than `timeout_s`.
    """
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
