"""What workers have compiled, for whoever is to compile the same: an island is back in a second, not in ten.

Executables lie in a folder, a file each, and are found by what was to be compiled, for which devices, by
which versions and on what kind of processor. A worker's next incarnation finds those of the one before, a
spare those of the host whose rank it takes, if they see the same folder, and tomorrow's cluster those of today.

To load an executable is to run code that somebody has written down. So a folder is used only if it belongs to
this user and no other user may write to it, or put another one in its place; a file in it only if the same is
true of the file. Otherwise everything is compiled, and a warning says so. A file that is written half, or by
another version, is no harm: its digest does not fit, and what it was for is compiled again.

JAX's own persistent cache is not used: on CPU it keeps nothing that was compiled by a rank other than 0, and
finds under no other rank what it keeps.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pickle
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

logger = logging.getLogger(__name__)

LIMIT_BYTES = 2 << 30
"""A folder with more than this loses what was used longest ago."""

_DIGEST_BYTES = 32


def default_folder() -> Path:
    """Where this user's workers keep their executables if they are told nothing else."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "pw" / "executables"


class Executables:
    """Keeps executables beyond the life of this process; used by the compile thread only.

    Args:
        folder: where; it is made if it is not there. None keeps nothing.
        limit_bytes: how much the folder may hold.
    """

    def __init__(self, folder: Path | None, limit_bytes: int = LIMIT_BYTES) -> None:
        self._folder: Path | None = None
        self._limit_bytes = limit_bytes
        self.loaded = 0
        self.failed = 0
        """Executables that could not be kept, or loaded, here: they are compiled instead."""
        if folder is not None:
            try:
                self._folder = _prepared(folder)
            except (OSError, _Untrusted) as error:
                self._distrust(f"{folder}: {error}")

    def _distrust(self, reason: str) -> None:
        """Say once why the folder is not used, or a file in it."""
        self.failed += 1
        if self.failed == 1:
            logger.warning(
                "compiled executables are not kept, or not taken from where they are why=%r next=%r",
                reason,
                "give the folder to this user alone (chown, chmod -R go-w), or name another one with "
                "--compile-cache or XDG_CACHE_HOME",
            )

    def load(self, key: bytes) -> Any:
        """The executable that was saved under `key` (32 bytes) on a machine like this; None if none was."""
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
            numbers, (data, takes, gives) = pickle.loads(saved)
            here = {device.id: device for device in jax.devices()}
            executable = serialize_executable.deserialize_and_load(
                data, takes, gives, execution_devices=[here[number] for number in numbers]
            )
        except Exception:  # noqa: BLE001 - it is compiled instead
            self.failed += 1
            return None
        self.loaded += 1
        return executable

    def save(self, key: bytes, executable: Any) -> None:
        """Keep an executable, where the platform can write it down and there is room."""
        if self._folder is None:
            return
        try:
            # JAX writes down for which devices it is, and by default loads it for all there are.
            devices = executable._executable._unloaded_executable.device_list
            numbers = [device.id for device in devices]
            data = pickle.dumps((numbers, serialize_executable.serialize(executable)))
        except Exception:  # noqa: BLE001 - not every platform can, and none has to
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
        except OSError:  # the disk is full, or somebody has taken the folder away
            self.failed += 1

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """A descriptor of the folder, which is still this user's alone. Raises OSError or _Untrusted."""
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
        # Every compilation comes here, and there may be thousands.
        with os.scandir(inside) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another worker makes room as well
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
    """Another user can write there, or has; says where."""


def _check(found: os.stat_result, what: str) -> None:
    """Raise _Untrusted unless a file or folder belongs to this user and no other user may write to it."""
    if found.st_uid != os.geteuid():
        raise _Untrusted(f"{what} belongs to user {found.st_uid}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _Untrusted(f"other users may write to {what}")


def _prepared(folder: Path) -> Path:
    """Make a folder if it is not there; where it really is. Raises OSError or _Untrusted."""
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
    """Raise _Untrusted if another user can put something else in the place of what is in a folder."""
    found = os.lstat(folder)
    if found.st_uid not in (0, os.geteuid()):
        raise _Untrusted(f"{folder} belongs to user {found.st_uid}")
    if stat.S_ISLNK(found.st_mode) or found.st_mode & stat.S_ISVTX:
        return
    own_group = found.st_gid == found.st_uid == os.geteuid()  # as most systems give each user one
    if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not own_group):
        raise _Untrusted(f"other users may write to {folder}")


def _read(name: str, inside: int) -> bytes:
    """What is in a file of a folder. Raises OSError, or _Untrusted if it is not this user's alone."""
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
    """What an executable is made for, beside its devices: versions, flags and the kind of processor."""
    try:
        cpu = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        processor = [line for line in cpu if line.startswith(("model name", "flags", "Features"))]
    except OSError:
        processor = [*os.uname()]
    device = jax.devices()[0]
    said = (
        jax.__version__,
        metadata.version("jaxlib"),
        device.client.platform_version,
        device.device_kind,
        os.environ.get("XLA_FLAGS", ""),
        os.environ.get("LIBTPU_INIT_ARGS", ""),
        processor,
    )
    return repr(said).encode()
