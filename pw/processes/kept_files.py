"""Files with what takes long to make, shared by all processes of a user and kept for the next run.

The name of a file is a digest of a key, and of the versions of what made it. Nothing in it is unpickled, but
loading an executable runs code from a file. So a folder is used only if it belongs to this user and no
other user may write to it, or replace it; the same holds for each file. Otherwise everything is made
again, and a warning says so. A half-written file, or one of another version, does not fit its digest.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 32

Loaded = TypeVar("Loaded")


def cache_folder(name: str) -> Path:
    """Return a folder of this user for files that can be made again."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "pw" / name


class KeptFiles:
    """A folder of files with what takes long to make.

    Args:
        folder: made if it does not exist. None keeps nothing.
        limit_bytes: the most that the folder may hold; the files that were used longest ago go first.
        what: the contents, in words, for the log.
        advice: what the user can do if the folder cannot be used.
    """

    def __init__(self, folder: Path | None, limit_bytes: int, what: str, advice: str) -> None:
        self._folder: Path | None = None
        self._limit_bytes = limit_bytes
        self._what = what
        self._advice = advice
        self.loaded = 0
        self.failed = 0
        """Number of files that could not be kept or loaded, and were made instead."""
        if folder is not None:
            try:
                self._folder = _prepared(folder)
            except (OSError, _Untrusted) as error:
                self._distrust(f"{folder}: {error}")

    def _distrust(self, reason: str) -> None:
        """Log once why the folder, or a file in it, is not used."""
        self.failed += 1
        if self.failed == 1:
            words = "%s are not kept or not loaded why=%r next=%r"
            logger.warning(words, self._what, reason, self._advice)

    def load_with(self, key: bytes, deserialize: Callable[[bytes], Loaded]) -> Loaded | None:
        """Return the result of `deserialize` for the bytes saved under `key`; None if there are none."""
        if self._folder is None:
            return None
        try:
            with self._opened() as inside:
                content = _read(self._name(key), inside)
        except FileNotFoundError:
            return None
        except _Untrusted as error:
            self._distrust(str(error))
            return None
        except OSError:
            self.failed += 1
            return None
        try:
            digest, saved = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
            if hashlib.sha256(saved).digest() != digest:
                raise ValueError("it was not written to its end")
            loaded = deserialize(saved)
        except Exception:  # noqa: BLE001 - it is made instead
            self.failed += 1
            return None
        self.loaded += 1
        return loaded

    def save_with(self, key: bytes, serialize: Callable[[], bytes]) -> None:
        """Keep the bytes that `serialize` returns, if it does not raise and there is room."""
        if self._folder is None:
            return
        try:
            data = serialize()
        except Exception:  # noqa: BLE001 - not every platform can serialize
            self.failed += 1
            return
        written = f"writing-{secrets.token_hex(8)}"
        try:
            with self._opened() as inside:
                try:
                    descriptor = os.open(
                        written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=inside
                    )
                    with os.fdopen(descriptor, "wb") as file:
                        file.write(hashlib.sha256(data).digest() + data)
                    os.replace(written, self._name(key), src_dir_fd=inside, dst_dir_fd=inside)
                except BaseException:
                    with suppress(OSError):
                        os.unlink(written, dir_fd=inside)
                    raise
                self._make_room(inside)
        except _Untrusted as error:
            self._distrust(str(error))
        except OSError:  # the disk is full, or the folder is gone
            self.failed += 1

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """A descriptor of the checked folder. Raises OSError or _Untrusted."""
        assert self._folder is not None
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _check(os.fstat(descriptor), str(self._folder))
            yield descriptor
        finally:
            os.close(descriptor)

    def _name(self, key: bytes) -> str:
        return hashlib.sha256(key + self._versions()).hexdigest()

    def _versions(self) -> bytes:
        """Return the versions, and all else besides the keys, on which the contents depend."""
        raise NotImplementedError

    def _make_room(self, inside: int) -> None:
        files = []
        # This is often called, and there may be thousands of files.
        with os.scandir(inside) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another process has removed it
                    status = entry.stat(follow_symlinks=False)
                    files.append((status.st_mtime, status.st_size, entry.name))
        total = sum(size for _, size, _ in files)
        if total <= self._limit_bytes:
            return
        for _, size, name in sorted(files):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=inside)
            total -= size
            if total <= self._limit_bytes:
                return


class _Untrusted(Exception):
    """Another user can write to a file or folder; the message names it."""


def _check(status: os.stat_result, what: str) -> None:
    """Raise _Untrusted unless a file or folder belongs to this user and no other user may write to
    it."""
    if status.st_uid != os.geteuid():
        raise _Untrusted(f"{what} belongs to user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _Untrusted(f"other users may write to {what}")


def _prepared(folder: Path) -> Path:
    """Make and check a folder; its real path. Raises OSError or _Untrusted."""
    folder = folder.absolute()
    missing = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
    for each in reversed(missing):
        with suppress(FileExistsError):
            each.mkdir(mode=0o700)
    real = folder.resolve()
    for each in dict.fromkeys((*folder.parents, folder, *real.parents)):
        _check_parent(each)
    _check(os.lstat(real), str(real))
    return real


def _check_parent(folder: Path) -> None:
    """Raise _Untrusted if another user can replace the entries of a folder."""
    status = os.lstat(folder)
    if status.st_uid not in (0, os.geteuid()):
        raise _Untrusted(f"{folder} belongs to user {status.st_uid}")
    if stat.S_ISLNK(status.st_mode) or status.st_mode & stat.S_ISVTX:
        return
    own_group = status.st_gid == status.st_uid == os.geteuid()  # as most systems give each user one
    if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not own_group):
        raise _Untrusted(f"other users may write to {folder}")


def _read(name: str, inside: int) -> bytes:
    """The content of a file in a folder. Raises OSError, or _Untrusted."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=inside)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _Untrusted(f"{name} is no file")
        _check(status, name)
        os.utime(descriptor)
        return file.read()
