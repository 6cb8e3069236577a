"""Programs as child processes: start one, wait for what it says, and find what it left behind.

Every process that a program starts inherits an environment variable with a marker of its own, so its
whole offspring can be found in /proc, even when another process has adopted it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.stages.forked import MARKER, MARKER_CHARACTERS
from tests.stages.programs import HERE, start

BOUND_S = 60.0


def until(condition: Callable[[], object], what: str, bound_s: float = BOUND_S) -> None:
    """Wait for a condition; fail with `what` if it does not come true in time."""
    begun_s = now_s = time.monotonic()
    while not condition():
        assert now_s < begun_s + bound_s, f"not within {bound_s:g} s: {what}"
        time.sleep(min(0.05, 0.005 + (now_s - begun_s) / 20))
        now_s = time.monotonic()


async def until_true(condition: Callable[[], object], what: str = "a condition") -> None:
    """Wait for a condition as `until` does, on an event loop."""
    until_s = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < until_s, f"not within {BOUND_S:g} s: {what}"
        await asyncio.sleep(0.001)


class Program:
    """One running program; its output goes to files, so that it never waits for a reader."""

    def __init__(
        self, folder: Path, arguments: list[str], *, new_interpreter: bool = False, **variables: str
    ) -> None:
        self.marker = secrets.token_hex(MARKER_CHARACTERS // 2)
        self.folder = folder / self.marker
        self.folder.mkdir(parents=True)
        self.temporary = Path(tempfile.mkdtemp(prefix="pw-test-"))  # unix sockets want short paths
        self.temporary.chmod(0o711)  # others may pass, as in /tmp
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PW_")}
        inherited |= HERE | {"TMPDIR": str(self.temporary), "COLUMNS": "100"}
        with (
            open(os.devnull) as nothing,
            (self.folder / "out").open("wb") as out,
            (self.folder / "err").open("wb") as err,
        ):
            self.process = start(
                arguments,
                inherited | {MARKER: self.marker} | variables,
                self.folder,
                (nothing.fileno(), out.fileno(), err.fileno()),
                new_interpreter=new_interpreter,
            )

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def until_says(self, text: str, bound_s: float = 90.0) -> None:
        """Wait until the program has written a whole line with `text` in it."""

        def said() -> bool:
            lines = [*self.out.splitlines(True), *self.err.splitlines(True)]
            return any(text in line and line.endswith("\n") for line in lines)

        until(
            lambda: said() or self.process.poll() is not None,
            f"{text!r} in {self.out!r} and {self.err!r}",
            bound_s,
        )
        assert said(), f"ended ({self.process.returncode}): {self.err}"

    def end(self, bound_s: float = 90.0) -> int:
        """Its exit code; negative if a signal ended it."""
        try:
            return self.process.wait(bound_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {bound_s:g} s: {self.err}") from None

    def family(self) -> set[int]:
        """Processes that carry the marker: the program and all that comes from it."""
        return marked(self.marker)

    def until_alone(self, *spared: int, bound_s: float = BOUND_S) -> None:
        """Wait until nothing of the program is left but `spared`, neither a process nor a file."""
        left = self.family()

        def is_alone() -> bool:
            nonlocal left
            left = marked(self.marker, left)
            if not left <= set(spared):
                return False
            left = self.family()  # those that others have started meanwhile
            return left <= set(spared) and not self.files()

        try:
            until(is_alone, "the end of it all", bound_s)
        except AssertionError as late:
            lines = [command_line(pid) for pid in self.family() - set(spared)]
            raise AssertionError(f"left: {lines}, {self.files()}: {self.err}") from late

    def files(self) -> list[str]:
        """What lies in the folder of its temporary files."""
        return sorted(path.name for path in self.temporary.iterdir())

    def kill(self) -> None:
        """End it and all that comes from it, whatever happened."""
        for pid in self.family():
            send(pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)


def start_module(module: str, *arguments: object, folder: Path, **variables: str) -> Program:
    """Start `python -m module`."""
    return Program(folder, ["-m", module, *map(str, arguments)], **variables)


def marked(marker: str, pids: Iterable[int] | None = None) -> set[int]:
    """Living processes with the marker in their environment, of these or of all."""
    wanted = f"{MARKER}={marker}".encode()
    found = set()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pids is None else pids:
        try:
            with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
                if wanted in file.readall():
                    found.add(pid)
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue  # ended meanwhile, or another user's
    return found


def command_line(pid: int) -> str:
    """What a process was started as; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def process_name(pid: int) -> str:
    """Return the name that a daemon which is a fork has, as `ps -c` and `top` show it."""
    return Path(f"/proc/{pid}/comm").read_text().strip()


def left_in_shared_memory() -> list[str]:
    """Return what clusters have left in shared memory; folders of gateways belong to other tests' scripts."""
    names = [name for name in os.listdir("/dev/shm") if name.startswith("pw")]
    return [name for name in names if not name.startswith("pw-jax-")]


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
