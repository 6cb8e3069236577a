"""Keeps compiled executables in a folder, so that a restarted island need not compile again.

Each executable is a file. Its name is a digest of the code, the number of devices, the versions and
the kind of processor. The next incarnation of a worker finds it, and so do other workers and later
clusters. On accelerators, the name says also which devices: there an executable is for these only.

A file holds what `pw.devices.jax.making.saved` writes: facts, and XLA's executable; nothing in it is
unpickled. But loading an executable runs code from a file. So a folder is used only if it belongs to
this user and no other user may write to it, or replace it; the same holds for each file. Otherwise
everything is compiled, and a warning says so. A half-written file, or one of another version, does
not fit its digest.

JAX's own persistent cache does not serve: on CPU it keeps only the executables of rank 0.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import jax

from pw.core.platforms import platform_of

logger = logging.getLogger(__name__)

LIMIT_BYTES = 2 << 30
"""A larger folder loses the executables that were used longest ago."""

_DIGEST_BYTES = 32

_FORMAT = 3
"""Grows when a file holds something else."""

Loaded = TypeVar("Loaded")


def default_folder() -> Path:
    """The folder for the executables of this user's workers, by default."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "pw" / "executables"


def may_be_kept(devices: Iterable[jax.Device]) -> bool:
    """Whether one process may load an executable for `devices` while others compile it.

    On accelerators, processes that compile together divide the search for the quickest kernels
    among them, and wait for what the others have found.
    """
    first, *others = devices
    return platform_of(first.platform).is_host or all(
        d.process_index == first.process_index for d in others
    )


def key_of(devices: Sequence[jax.Device], *wish: object) -> bytes | None:
    """What an executable for these devices is saved under, if nothing else than `wish` determines it.

    CPU devices share it: XLA takes the device assignment when it loads an executable. None if it is
    not to be kept.
    """
    if not may_be_kept(devices):
        return None
    where: object = len(devices)
    if not platform_of(devices[0].platform).is_host:
        names = [f"{device.platform}:{device.process_index}:{device.id}" for device in devices]
        where = (names, jax.process_index(), jax.process_count())
    return hashlib.sha256(repr((where, wish)).encode()).digest()


class Executables:
    """The folder of executables; used by the compile thread only.

    Args:
        folder: made if it does not exist. None keeps nothing.
        limit_bytes: the most that the folder may hold.
    """

    def __init__(self, folder: Path | None, limit_bytes: int = LIMIT_BYTES) -> None:
        self._folder: Path | None = None
        self._limit_bytes = limit_bytes
        self.loaded = 0
        self.failed = 0
        """Executables that could not be kept or loaded, and were compiled instead."""
        if folder is not None:
            try:
                self._folder = _prepared(folder)
            except (OSError, _Untrusted) as error:
                self._distrust(f"{folder}: {error}")

    def _distrust(self, reason: str) -> None:
        """Log once why the folder, or a file in it, is not used."""
        self.failed += 1
        if self.failed == 1:
            logger.warning(
                "compiled executables are not kept or not loaded why=%r next=%r",
                reason,
                "give the folder to this user alone (chown, chmod -R go-w), or name another one with "
                "--compile-cache or XDG_CACHE_HOME",
            )

    def load_with(self, key: bytes, deserialize: Callable[[bytes], Loaded]) -> Loaded | None:
        """What `deserialize` makes of the bytes saved under `key`; None if there are none."""
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
            executable = deserialize(saved)
        except Exception:  # noqa: BLE001 - it is compiled instead
            self.failed += 1
            return None
        self.loaded += 1
        return executable

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
                    made = os.open(
                        written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=inside
                    )
                    with os.fdopen(made, "wb") as file:
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
        return hashlib.sha256(key + _machine()).hexdigest()

    def _make_room(self, inside: int) -> None:
        files = []
        # Each compilation calls this, and there may be thousands of files.
        with os.scandir(inside) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another worker has removed it
                    found = entry.stat(follow_symlinks=False)
                    files.append((found.st_mtime, found.st_size, entry.name))
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


def _check(found: os.stat_result, what: str) -> None:
    """Raise _Untrusted unless a file or folder belongs to this user and no other user may write to
    it."""
    if found.st_uid != os.geteuid():
        raise _Untrusted(f"{what} belongs to user {found.st_uid}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
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
    found = os.lstat(folder)
    if found.st_uid not in (0, os.geteuid()):
        raise _Untrusted(f"{folder} belongs to user {found.st_uid}")
    if stat.S_ISLNK(found.st_mode) or found.st_mode & stat.S_ISVTX:
        return
    own_group = found.st_gid == found.st_uid == os.geteuid()  # as most systems give each user one
    if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not own_group):
        raise _Untrusted(f"other users may write to {folder}")


def _read(name: str, inside: int) -> bytes:
    """The content of a file in a folder. Raises OSError, or _Untrusted."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=inside)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _Untrusted(f"{name} is no file")
        _check(found, name)
        os.utime(descriptor)
        return file.read()


@functools.cache
def _machine() -> bytes:
    """The versions, flags and kind of processor that an executable depends on."""
    try:
        cpu = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        processor = [line for line in cpu if line.startswith(("model name", "flags", "Features"))]
    except OSError:
        processor = [*os.uname()]
    device = jax.devices()[0]
    said = (
        _FORMAT,
        jax.__version__,
        metadata.version("jaxlib"),
        device.client.platform_version,
        device.device_kind,
        os.environ.get("XLA_FLAGS", ""),
        os.environ.get("LIBTPU_INIT_ARGS", ""),
        processor,
    )
    return repr(said).encode()
