"""What workers have compiled, for whoever is to compile the same: an island is back in a second, not in ten.

Executables lie in a folder, a file each, and are found by what was to be compiled, for which devices, by
which versions and on what kind of processor. A worker's next incarnation finds those of the one before, a
spare those of the host whose rank it takes, if they see the same folder, and tomorrow's cluster those of today.

To load an executable is to run code that somebody has written down. So a folder is used only if it belongs to
this user and nobody else may write to it. A file that is written half, or by another version, is no harm: its
digest does not fit, and what it was for is compiled again.

JAX's own persistent cache is not used: on CPU it keeps nothing that was compiled by a rank other than 0, and
finds under no other rank what it keeps.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import stat
import tempfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

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
        self._folder = folder if folder is not None and _is_ours(folder) else None
        self._limit_bytes = limit_bytes
        self.loaded = 0
        self.failed = 0 if folder is None or self._folder is not None else 1
        """Executables that could not be kept, or loaded, here: they are compiled instead."""

    def load(self, key: bytes) -> Any:
        """The executable that was saved under `key` (32 bytes) on a machine like this; None if none was."""
        if self._folder is None:
            return None
        file = self._file(key)
        try:
            content = file.read_bytes()
            os.utime(file)
        except FileNotFoundError:
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
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                try:
                    file.write(hashlib.sha256(data).digest() + data)
                    file.flush()
                    os.replace(file.name, self._file(key))
                except BaseException:
                    os.unlink(file.name)
                    raise
            self._make_room()
        except OSError:  # the disk is full, or somebody has taken the folder away
            self.failed += 1

    def _file(self, key: bytes) -> Path:
        assert self._folder is not None
        return self._folder / hashlib.sha256(key + _machine()).hexdigest()

    def _make_room(self) -> None:
        assert self._folder is not None
        files = []
        # Every compilation comes here, and there may be thousands.
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another worker makes room as well
                    found = entry.stat()
                    files.append((found.st_mtime, found.st_size, entry.path))
        total = sum(size for _, size, _ in files)
        if total <= self._limit_bytes:
            return
        for _, size, path in sorted(files):
            Path(path).unlink(missing_ok=True)
            total -= size
            if total <= self._limit_bytes:
                return


def _is_ours(folder: Path) -> bool:
    """Whether nobody else can put code there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError:
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    return found.st_uid == os.geteuid() and not found.st_mode & others


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
