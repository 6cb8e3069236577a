"""Files that only this user may read: private keys, and what stands beside them."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from pw.core.errors import Error

_MOST_BYTES = 1 << 22


def read(file: Path, private: bool = True) -> bytes:
    """The content of a file.

    Args:
        private: whether other users must not be able to read it.

    Raises:
        Error: it cannot be read, or others could read it.
    """
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            content = opened.read(_MOST_BYTES)
    except OSError as error:
        raise Error(f"{file} cannot be read: {error.strerror}") from error
    if private and not is_private(status):
        raise Error(
            f"other users can read the private key in {file}: make it this user's own, and chmod 600 {file}"
        )
    return content


def is_private(status: os.stat_result) -> bool:
    """Whether only this user and root can read a file.

    A file of root may be readable by a group of this process, as Kubernetes mounts secrets with `fsGroup`.
    """
    mode, user = stat.S_IMODE(status.st_mode), os.geteuid()
    if status.st_uid not in (0, user) or mode & 0o007:
        return False
    of_group = status.st_uid == 0 != user and status.st_gid in (os.getegid(), *os.getgroups())
    return not mode & 0o077 or (of_group and not mode & 0o020)


def write(file: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file, or replace it at once. Raises Error."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
        try:
            with os.fdopen(descriptor, "wb") as opened:
                os.fchmod(descriptor, mode)
                opened.write(content)
                opened.flush()
                os.fsync(descriptor)
            os.replace(name, file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        raise Error(f"{file} cannot be written: {error.strerror}") from error


def make_folder(folder: Path) -> None:
    """Make a folder that only this user can enter. If it exists, raise Error if others can write there."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise Error(f"the folder {folder} cannot be made: {error.strerror}") from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise Error(
            f"other users can write to {folder}: make it this user's own, and chmod 700 {folder}"
        )
