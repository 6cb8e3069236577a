"""The parcel of a worker that ends, in a file: the next worker with the same name begins with it.

A parcel (`pw.cli.supervision`) is memory, and goes with the supervisor. In a folder that other machines see,
it outlives the machine. The file has the parcel and, at its end, the place of its index and a digest of all
(BLAKE2b, RFC 7693), so that a file that was damaged is not used. It is written under another name first, so
that a file is whole or not there. Arrays do not change, so an old file has no wrong ones; but numbers of
clients come again after days, so a file counts for `KEPT_FOR_S` only.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from hashlib import blake2b
from pathlib import Path
from urllib.parse import quote

from pw.cli.supervision import Parcel
from pw.core.errors import ArgumentError

KEPT_FOR_S = 24 * 3600.0
"""Seconds after which a file is too old to begin with."""
PIECE_BYTES = 16 << 20
"""Bytes of one copy."""
_END = struct.Struct(">8sQ32s")
_MARK = b"pwparcel"


class ParcelFile:
    """The file of one worker.

    Args:
        folder: the folder of `--keep-files`; it is made if it is not there.
        name: of the worker.

    Raises:
        ArgumentError: nothing can be written there.
    """

    def __init__(self, folder: str, name: str) -> None:
        self._path = Path(folder).absolute() / f"{quote(name, safe='')}.parcel"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(f"--keep-files {folder}: {error.strerror}") from None
        if not os.access(self._path.parent, os.W_OK):
            raise ArgumentError(f"--keep-files {folder}: this user may not write there")

    def load(self) -> Parcel | None:
        """Return the parcel in the file, in memory; None without one.

        Raises:
            OSError: the file cannot be read, is too old, or was damaged.
        """
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            state = os.fstat(descriptor)
            if time.time() - state.st_mtime > KEPT_FOR_S:
                raise OSError(f"{self._path} is too old")
            size_bytes = max(0, state.st_size - _END.size)
            end = os.pread(descriptor, _END.size, size_bytes)
            parcel = Parcel(os.memfd_create("pw-handover", os.MFD_CLOEXEC), 0)
            try:
                digest = _copy(descriptor, parcel.descriptor, size_bytes)
                mark, parcel.index_offset, expected = _END.unpack(end.ljust(_END.size, b"\0"))
                if mark != _MARK or digest != expected or parcel.index_offset > size_bytes:
                    raise OSError(f"{self._path} was damaged")
            except BaseException:
                parcel.close()
                raise
            return parcel
        finally:
            os.close(descriptor)

    def store(self, parcel: Parcel) -> int:
        """Write a parcel in place of an earlier one; return its bytes.

        Raises:
            OSError: it cannot be written.
        """
        part = self._path.with_suffix(f".{os.getpid()}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            part.unlink(missing_ok=True)
            descriptor = os.open(part, flags, 0o600)
            try:
                size_bytes = os.fstat(parcel.descriptor).st_size
                digest = _copy(parcel.descriptor, descriptor, size_bytes)
                os.pwrite(descriptor, _END.pack(_MARK, parcel.index_offset, digest), size_bytes)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            part.replace(self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        return size_bytes

    def remove(self) -> None:
        """Remove the file, if it is there: another parcel has taken its place, or it is of no use."""
        with contextlib.suppress(OSError):
            self._path.unlink()


def _copy(source: int, target: int, size_bytes: int) -> bytes:
    """Copy so many bytes between two files, from their begins; return their digest (32 bytes)."""
    digest, offset = blake2b(digest_size=32), 0
    while offset < size_bytes:
        piece = os.pread(source, min(PIECE_BYTES, size_bytes - offset), offset)
        if not piece:
            raise OSError(f"the file ends after {offset} of {size_bytes} bytes")
        digest.update(piece)
        left = memoryview(piece)
        while left:
            written = os.pwrite(target, left, offset)
            left, offset = left[written:], offset + written
    return digest.digest()
