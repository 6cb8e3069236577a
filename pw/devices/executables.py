"""What a host has compiled, for its next incarnation: an island is back in a second, not in ten.

Executables lie in an anonymous memory file that the supervisor makes and every runtime child inherits, one
after the other in the order in which they were compiled. A child that is killed while it writes
does no harm: what counts is the length at the beginning of the file, which is written last.

Only what this host has compiled itself is in the file; nothing that comes from elsewhere is ever loaded. An
executable is found by what was to be compiled and by the devices that it was compiled for, so
a host that has another rank compiles anew.
"""

from __future__ import annotations

import os
import pickle
import struct
from typing import Any

import jax
from jax.experimental import serialize_executable

LIMIT_BYTES = 512 << 20
"""What is compiled when the file is full is compiled again by the next incarnation."""

_LENGTH = struct.Struct("<Q")
_HEADER = struct.Struct("<32sQ")


class Executables:
    """Keeps executables beyond the life of this process; used by the compile thread only.

    Args:
        descriptor: the file, empty or as an earlier incarnation of this host has left it; -1 for none.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._found: dict[bytes, tuple[int, int]] | None = None
        """Where executables are and how large, once the file has been looked at."""
        self._end = _LENGTH.size
        self.loaded = 0
        self.failed = 0
        """Executables that could not be kept, or loaded, on this platform: they are compiled instead."""

    def load(self, key: bytes) -> Any:
        """The executable that was saved under `key` (32 bytes); None if there is none."""
        if self._descriptor < 0:
            return None
        place = self._index().get(key)
        if place is None:
            return None
        offset, size = place
        try:
            saved = pickle.loads(os.pread(self._descriptor, size, offset))
            numbers, (data, takes, gives) = saved
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
        if self._descriptor < 0:
            return
        index = self._index()
        try:
            # JAX writes down for which devices it is, and by default loads it for all there are.
            devices = executable._executable._unloaded_executable.device_list
            numbers = [device.id for device in devices]
            data = pickle.dumps((numbers, serialize_executable.serialize(executable)))
        except Exception:  # noqa: BLE001 - not every platform can, and none has to
            self.failed += 1
            return
        end = self._end + _HEADER.size + len(data)
        if end > LIMIT_BYTES:
            return
        try:
            self._write(self._end, _HEADER.pack(key, len(data)) + data)
            self._write(0, _LENGTH.pack(end))
        except OSError:  # memory is short
            self.failed += 1
            return
        index[key] = (end - len(data), len(data))
        self._end = end

    def _index(self) -> dict[bytes, tuple[int, int]]:
        if self._found is None:
            self._found = {}
            length = os.pread(self._descriptor, _LENGTH.size, 0)
            end = _LENGTH.unpack(length)[0] if length else _LENGTH.size
            while self._end < end:
                header = os.pread(self._descriptor, _HEADER.size, self._end)
                key, size = _HEADER.unpack(header)
                self._found[key] = (self._end + _HEADER.size, size)
                self._end += _HEADER.size + size
        return self._found

    def _write(self, offset: int, data: bytes) -> None:
        left = memoryview(data)
        while left:
            written = os.pwrite(self._descriptor, left, offset)
            left, offset = left[written:], offset + written
