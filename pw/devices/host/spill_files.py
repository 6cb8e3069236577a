"""The files of one host for arrays that have left its memory.

Each array has a file of its own, with the different shards that this host has of it. A thread writes the file
under a temporary name, and renames it when it is on disk. Then the host maps it, so that reads cost no memory
of the process. Deleted files stay readable for what has mapped them.

The files lie in a folder of this process alone, in the folder that the operator has named. The process holds a
lock on its folder (`flock`). A folder without a lock belongs to a process of this machine that was killed, and
the next process that starts here removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pw.core.errors import Error, ErrorReport
from pw.core.sharding import Box, DeviceAddress, box_slices, packed_offsets
from pw.devices.host.backend import Build, Move, Part
from pw.devices.host.checkpoint_files import BlockingCalls

PIECE_BYTES = 16 << 20
"""Bytes of one write."""


class SpillFiles(Protocol):
    """Keeps shards in files; all methods are called on the loop thread, and none blocks."""

    def write(
        self, parts: Sequence[Part], devices: tuple[DeviceAddress, ...], done: Callable[[Any], None]
    ) -> None:
        """Write the shards of an array to a file.

        Args:
            parts: the different shards: their positions in the mesh, their box, and a view of their bytes.
            devices: devices at the positions of the mesh.
            done: called on the loop thread with the payload of a `FileValue`, or with an `ErrorReport`; then
                nothing is left of the file.
        """

    def view(self, file: Any, position: int) -> np.ndarray[Any, Any]:
        """Return a view of the shard at a position in a file; it can be read when the file is deleted."""

    def delete(self, file: Any) -> None:
        """Delete the file of a payload; ops that have been submitted still read it."""


class MappedFile:
    """The shards of one array in a file: the payload of a `FileValue`.

    The methods without arguments are those of a `jax.Array` that is ready.
    """

    def __init__(self, path: str, parts: Sequence[Part]) -> None:
        self.path = path
        self.parts = tuple(parts)
        """Positions in the mesh, box and bytes of each different shard; reading them reads the file."""
        self._shards = {position: shard for positions, _, shard in parts for position in positions}

    def shard(self, position: int) -> np.ndarray[Any, Any]:
        """Return a view of the shard at a position."""
        return self._shards[position]

    def read(self, boxes: Sequence[tuple[int, Box]]) -> list[np.ndarray[Any, Any]]:
        """Return views of boxes of shards, once their bytes are in the page cache; blocks for the disk."""
        for shard in {id(one): one for one in map(self.shard, dict(boxes))}.values():
            shard.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE].max(initial=0)
        # An array without dimensions, indexed, would be a scalar.
        return [self.shard(at)[box_slices(box)] if box else self.shard(at) for at, box in boxes]

    def build(self, move: Move) -> Build:
        """Return the op that does a move from the file to devices."""
        return Build(move.result, move.spec, move.devices, self.parts, is_copied=True)

    def is_ready(self) -> bool:
        """Return True: the file is complete."""
        return True

    def is_deleted(self) -> bool:
        """Return False: its pages stay as long as this object."""
        return False

    def block_until_ready(self) -> None:
        """Return at once."""


class SpillFolder:
    """The folder of this process for arrays (see `SpillFiles`).

    Args:
        folder: the folder that the operator has named.
        aside: threads for blocking calls.

    Raises:
        Error: nothing can be written there.
    """

    def __init__(self, folder: str, aside: BlockingCalls) -> None:
        check_folder(folder)
        self.folder = folder
        self._aside = aside
        self._files = 0
        begin = f"pw-{os.uname().nodename}-"
        try:
            _remove_unused(folder, begin)
            # No other process takes a folder for unused before this one has the lock on it.
            fresh = tempfile.mkdtemp(prefix=f".{begin}", dir=folder)
            self._lock = _locked(fresh)
            self.path = os.path.join(folder, os.path.basename(fresh)[1:])
            """Folder of this process."""
            os.rename(fresh, self.path)
        except OSError as error:
            raise _unwritable(folder, error) from None

    def write(
        self, parts: Sequence[Part], devices: tuple[DeviceAddress, ...], done: Callable[[Any], None]
    ) -> None:
        """Write the shards of an array to a file on another thread."""
        self._files += 1
        path = os.path.join(self.path, str(self._files))

        def ended(result: MappedFile | BaseException) -> None:
            if isinstance(result, OSError):
                result = _unwritable(self.folder, result)
            done(ErrorReport.of(result) if isinstance(result, BaseException) else result)

        self._aside.call(partial(_write, path, parts), ended)

    def view(self, file: MappedFile, position: int) -> np.ndarray[Any, Any]:
        """Return a view of the shard at a position; reading it reads the file."""
        return file.shard(position)

    def delete(self, file: MappedFile) -> None:
        """Delete a file on another thread."""
        self._aside.call(partial(_unlink, file.path), lambda _: None)

    def close(self) -> None:
        """Remove the folder, and all files that are being written."""
        ended = f"{self.path}-ended"
        with contextlib.suppress(OSError):
            os.rename(self.path, ended)  # so that no thread makes another file there
        shutil.rmtree(ended, ignore_errors=True)
        os.close(self._lock)


def check_folder(folder: str) -> None:
    """Raise Error unless files can be written in a folder."""
    if not os.path.isdir(folder):
        raise Error(
            f"there is no folder {folder} for arrays that leave host memory (--spill-files); make it, or name "
            "another one"
        )
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".pw-", dir=folder))
    except OSError as error:
        raise _unwritable(folder, error) from None


def _unwritable(folder: str, error: OSError) -> Error:
    return Error(
        f"arrays that leave host memory cannot be written to {folder} (--spill-files): {error.strerror}. Make "
        "room there, give this process the right to write there, or name another folder"
    )


def _locked(folder: str) -> int:
    """Return a descriptor with a lock on a folder, which ends with this process. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_unused(folder: str, begin: str) -> None:
    """Remove the folders of processes of this machine that have ended."""
    for path in Path(folder).glob(f"{begin}*"):
        with contextlib.suppress(OSError):
            descriptor = _locked(str(path))
            shutil.rmtree(path, ignore_errors=True)
            os.close(descriptor)


def _write(path: str, parts: Sequence[Part]) -> MappedFile:
    """Write shards to a file, and map it. Raises OSError."""
    offsets, total = packed_offsets([shard.nbytes for _, _, shard in parts])
    unfinished = f"{path}.part"
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, total)
        for offset, (_, _, shard) in zip(offsets, parts, strict=True):
            for piece in _pieces(shard):
                while piece:
                    written = os.pwrite(descriptor, piece, offset)
                    piece, offset = piece[written:], offset + written
        os.fsync(descriptor)
        os.rename(unfinished, path)
        content = np.frombuffer(mmap.mmap(descriptor, total, prot=mmap.PROT_READ), np.uint8)
    except BaseException:
        _unlink(unfinished)
        _unlink(path)
        raise
    finally:
        os.close(descriptor)
    mapped = [
        (positions, box, content[at : at + one.nbytes].view(one.dtype).reshape(one.shape))
        for at, (positions, box, one) in zip(offsets, parts, strict=True)
    ]
    return MappedFile(path, mapped)


def _pieces(shard: np.ndarray[Any, Any]) -> Iterator[memoryview]:
    """Yield the bytes of a shard, row-major."""
    content = np.ascontiguousarray(shard).reshape(-1).view(np.uint8).data
    for start in range(0, len(content), PIECE_BYTES):
        yield content[start : start + PIECE_BYTES]


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
