"""The private directory with the unix sockets of a cluster on one machine.

Only its owner can enter it (mode 0700), so no other user can reach a socket in it. The command that
starts a cluster makes the directory. Each process of the cluster holds a shared lock on it
(`flock`), and the last one removes it. A directory without a lock belongs to a cluster that was
killed; the next cluster that starts removes it. (systemd-tmpfiles leaves locked directories alone.)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from pw.core.errors import ConnectionFailed
from pw.transport.endpoints import PATH_BYTES, parse_bind

PREFIX = "pw-cluster-"
CONTROLLER = "controller"
LONGEST_NAME = 20
"""Bytes of the longest name of a socket in the directory."""
STALE_S = 60.0
"""Least age, in seconds, of a directory that is removed: a cluster may be starting in a younger one."""
LOOK_S = 0.02
"""Seconds between two looks whether other processes have left."""


def is_private(folder: str | Path) -> bool:
    """Whether this user owns a directory, and no other user can enter it."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & 0o077
    )


def beside(endpoint: str) -> Path | None:
    """The directory of an `ipc://` endpoint, if it is private.

    Raises:
        ConnectionFailed: it is no endpoint.
    """
    path = parse_bind(endpoint)[0].address
    if not isinstance(path, str) or not path.startswith("/"):
        return None
    folder = Path(path).parent
    return folder if is_private(folder) else None


def free_endpoint(folder: Path | None, kind: str, host: str = "127.0.0.1") -> str:
    """An endpoint to listen at: in a private directory or, without one, at a free port of `host`."""
    return f"tcp://{host}:0" if folder is None else f"ipc://{folder}/{kind}-*"


class PrivateFolder:
    """A process's lock on a private directory, until `leave`."""

    def __init__(self, path: Path) -> None:
        """Enter an existing directory. Raises OSError."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(self._descriptor)
            raise
        _entered.add(self)

    @classmethod
    def make(cls, bases: Sequence[str] | None = None) -> PrivateFolder:
        """Make a directory for a new cluster, and enter it.

        Args:
            bases: directories to make it in, the best first; by default `base_folders()`.

        Raises:
            ConnectionFailed: it can be made nowhere.
        """
        for base in base_folders() if bases is None else bases:
            _remove_stale(base)
            with contextlib.suppress(OSError):
                return cls(Path(tempfile.mkdtemp(prefix=PREFIX, dir=base)))
        raise ConnectionFailed(
            "there is no directory for the sockets of a local cluster: set TMPDIR to one with a short path, "
            "in which this user may write and no other user may rename files"
        )

    @classmethod
    def of(cls, endpoint: str) -> PrivateFolder | None:
        """Enter the directory of an endpoint; None if it is not private, or is being removed."""
        folder = beside(endpoint)
        if folder is None:
            return None
        try:
            return cls(folder)
        except OSError:
            return None

    @property
    def controller(self) -> str:
        """The endpoint of the cluster's controller."""
        return f"ipc://{self.path}/{CONTROLLER}"

    def leave(self, patience_s: float = 0.0) -> None:
        """Leave; the last process removes a directory that was made by `make`. Idempotent.

        Args:
            patience_s: how long to wait for the others. A process that was killed ends its channels a moment
                before its locks, so those who see its end would all find the directory in use.
        """
        if self._descriptor < 0:
            return
        if self.path.name.startswith(PREFIX):
            until_s = time.monotonic() + patience_s
            while not _remove_unused(self.path, self._descriptor) and time.monotonic() < until_s:
                time.sleep(LOOK_S)
        self.let_go()

    def let_go(self) -> None:
        """Leave without removing anything."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


_entered: weakref.WeakSet[PrivateFolder] = weakref.WeakSet()


def _forked() -> None:
    """Leave the lock to the parent."""
    for folder in _entered:
        folder.let_go()


os.register_at_fork(after_in_child=_forked)


def base_folders(path_bytes: int = PATH_BYTES) -> list[str]:
    """The directories in which private ones can be made, the best first.

    Args:
        path_bytes: how long the path of a socket may be.
    """
    bases = []
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and is_private(runtime):
        bases.append(runtime)
    bases += [base for base in (tempfile.gettempdir(), "/tmp") if _keeps_names(base)]
    random_bytes = 8
    longest = path_bytes - len(PREFIX) - random_bytes - LONGEST_NAME - len("//")
    return [base for base in bases if len(os.fsencode(base)) <= longest]


def _keeps_names(folder: str) -> bool:
    """Whether no other user, except root, can rename this user's files in a directory."""
    try:
        status = os.stat(folder)
    except OSError:
        return False
    is_shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid in (0, os.geteuid()) and (
        not is_shared or bool(status.st_mode & stat.S_ISVTX)
    )


def _remove_stale(base: str) -> None:
    """Remove the directories of clusters without processes."""
    with contextlib.suppress(OSError), os.scandir(base) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and is_private(entry.path):
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat().st_mtime > STALE_S:
                        descriptor = os.open(
                            entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                        )
                        try:
                            _remove_unused(Path(entry.path), descriptor)
                        finally:
                            os.close(descriptor)


def _remove_unused(folder: Path, descriptor: int) -> bool:
    """Remove a directory unless another process has a lock on it; return whether none has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return True
