"""Where checkpoints may lie, and how their files are opened.

Clients name the paths. A path is resolved first, so that no symbolic link leads out of the folder that the
owner of the host allows. Files are opened without following links, and only if they are regular: a FIFO
would block the thread, and a device may have any size. All calls block.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

from pw.core.errors import CheckpointFailed
from pw.core.messages.checks import check_path

INDEX_BYTES = 64 << 20
"""The largest manifest, and the largest header of a file: they are read whole."""

_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def resolved(path: str, root: str) -> str:
    """Return the path of a checkpoint without symbolic links.

    Args:
        path: the path that a client has given.
        root: the folder in which it must lie, resolved; empty if it may be anywhere.

    Raises:
        CheckpointFailed: it is no path of a checkpoint, or outside of the folder.
    """
    check_path(path)
    try:
        real = os.path.realpath(path)
    except (OSError, ValueError) as error:
        raise CheckpointFailed(f"{path!r} is no path for a checkpoint: {error}") from error
    if root and not real.startswith(root.rstrip("/") + "/"):
        raise CheckpointFailed(
            f"{path} is outside of {root}, where this host writes and reads checkpoints; choose a path in "
            "there, or ask its owner to start it with another --checkpoint-root"
        )
    return real


def missing(paths: Sequence[str], root: str) -> tuple[str, ...]:
    """Return the paths at which there is no folder any more; not those that this host cannot see.

    Args:
        paths: of checkpoints.
        root: see `resolved`; what is outside of it is not looked at.
    """
    return tuple(path for path in paths if _is_missing(path, root))


def _is_missing(path: str, root: str) -> bool:
    try:
        return not stat.S_ISDIR(os.stat(resolved(path, root)).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (CheckpointFailed, OSError):
        return False


def opened(path: str) -> BinaryIO:
    """Open a regular file for reading; no part of the path may be a symbolic link.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is no regular file.
    """
    with _folder_of(path) as folder:
        descriptor = os.open(os.path.basename(path), _FILE, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path} is no regular file")
        return os.fdopen(descriptor, "rb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


@contextmanager
def _folder_of(path: str) -> Iterator[int]:
    """Yield a descriptor of the folder of a file; a part that has become a link since is not followed."""
    folder = os.open("/", _FOLDER)
    try:
        for part in os.path.dirname(path).split("/"):
            if part:
                inner = os.open(part, _FOLDER, dir_fd=folder)
                os.close(folder)
                folder = inner
        yield folder
    finally:
        os.close(folder)


def read_exactly(file: BinaryIO, size_bytes: int) -> bytes:
    """Return the next bytes of a file; fewer if it ends before."""
    parts: list[bytes] = []
    while size_bytes > 0 and (part := file.read(size_bytes)):
        parts.append(part)
        size_bytes -= len(part)
    return b"".join(parts)


def read_whole(path: str) -> bytes:
    """Return the bytes of a small file.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is no regular file, or larger than `INDEX_BYTES`.
    """
    with opened(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > INDEX_BYTES:
            raise ValueError(f"it has {size_bytes} bytes; {INDEX_BYTES} are the most")
        return read_exactly(file, size_bytes)
