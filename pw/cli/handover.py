"""The parcel that a runtime child leaves to the next one: arrays in one anonymous memory file.

The file begins with the arrays, each row-major at a boundary that JAX can alias, and ends with an
index of them. The next child maps the file and makes arrays of it without a copy. The file has no
name: when no process holds it, its pages are freed, even after SIGKILL.

If some of the replicas are in files (`pw.devices.host.held_boxes`), the parcel is a file on that disk,
also without a name, so that it takes no memory either.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pw.cli.supervision import Parcel
from pw.core.sharding import Box, dtype_of, packed_offsets
from pw.devices.host.replica_memory import Replica
from pw.transport.log import log

PIECE_BYTES = 16 << 20
"""Bytes of one write: some ten milliseconds."""

BEAT_S = 0.1
"""Time between two beats while arrays are written."""

FETCH_S = 20.0
"""Seconds that one array may take to come from its device, before the beats stop."""


class ReplicaEntry(msgspec.Struct, frozen=True, array_like=True):
    """The place of a replica in the file."""

    array: int
    box: Box
    shape: tuple[int, ...]
    dtype: str
    offset: int
    proof: bytes


_decode = msgspec.msgpack.Decoder(list[ReplicaEntry]).decode


def pack(replicas: Sequence[Replica], folder: str = "") -> Parcel:
    """Write arrays to a new anonymous file, all of them.

    Args:
        replicas: array ids, boxes, their values in any layout, and proofs.
        folder: folder for the file if the first replica is in a file; the others are in memory, as are all if
            there is no room in the folder.

    Raises:
        OSError: there is no room for them.
    """
    if folder and replicas and replicas[0].in_file:
        with contextlib.suppress(OSError):
            return _packed(replicas, lambda: None, _raise, folder)
    return _packed(replicas, lambda: None, _raise)


def pack_what_fits(
    replicas: Iterable[Replica], beat: Callable[[], None], folder: str = ""
) -> Parcel:
    """Write as many arrays as there is room for.

    Args:
        replicas: as for `pack`; taken one by one.
        beat: called from another thread while this goes on.
        folder: as for `pack`; what does not fit there is left out.

    Raises:
        OSError: there is no room even for the index.
    """

    def leave_out(error: OSError) -> None:
        log("error", "hand-over is not complete", "", reason=error)

    with _beating(beat) as went_on:
        return _packed(replicas, went_on, leave_out, folder)


def _packed(
    replicas: Iterable[Replica],
    went_on: Callable[[], None],
    no_room: Callable[[OSError], None],
    folder: str = "",
) -> Parcel:
    left = iter(replicas)
    first = next(left, None)
    on_disk = first is not None and first.in_file and bool(folder)
    parcel = Parcel(_file_in(folder) if on_disk else _file_in_memory(), 0)
    index: list[ReplicaEntry] = []
    try:
        for array, box, data, proof, _ in itertools.chain([first] if first else [], left):
            (_, start), _ = packed_offsets([parcel.index_offset, data.nbytes])
            try:
                _write(parcel.descriptor, start, data, went_on)
            except OSError as error:
                no_room(error)
                break
            index.append(ReplicaEntry(array, box, data.shape, data.dtype.name, start, proof))
            parcel.index_offset = start + data.nbytes
        os.ftruncate(parcel.descriptor, parcel.index_offset)
        os.pwrite(parcel.descriptor, msgspec.msgpack.encode(index), parcel.index_offset)
    except BaseException:
        parcel.close()
        raise
    return parcel


def _file_in_memory() -> int:
    return os.memfd_create("pw-handover", os.MFD_CLOEXEC)


def _file_in(folder: str) -> int:
    """Return a descriptor of a new file without a name in a folder, or in memory if that fails."""
    try:
        descriptor, path = tempfile.mkstemp(prefix="parcel-", dir=folder)
    except OSError as error:
        log("warning", "a hand-over is in memory", "", reason=error)
        return _file_in_memory()
    os.unlink(path)
    return descriptor


def _is_on_disk(descriptor: int) -> bool:
    """Whether a file is not in memory: the kernel seals files in memory only."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return True
    return False


def _raise(error: OSError) -> None:
    raise error


@contextlib.contextmanager
def _beating(beat: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Beat from another thread while the block goes on: it calls the given function for each piece.

    A beat for each piece would fill the socket to the supervisor.
    """
    went_on_s = time.monotonic()
    ended = threading.Event()

    def went_on() -> None:
        nonlocal went_on_s
        went_on_s = time.monotonic()

    def work() -> None:
        while not ended.wait(BEAT_S):
            if time.monotonic() - went_on_s < FETCH_S:
                beat()

    thread = threading.Thread(target=work, name="pw-beat", daemon=True)
    thread.start()
    try:
        yield went_on
    finally:
        ended.set()
        thread.join()


def _write(
    descriptor: int, offset: int, data: npt.NDArray[Any], went_on: Callable[[], None]
) -> None:
    left = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
    while left:
        # Writing is quicker than copying to mapped pages, which the kernel zeroes first.
        written = os.pwrite(descriptor, left[:PIECE_BYTES], offset)
        left, offset = left[written:], offset + written
        went_on()


def unpack(parcel: Parcel, dropped: Callable[[], None]) -> list[Replica]:
    """Return the arrays of a parcel, read-only and without a copy; closes the parcel.

    Args:
        parcel: made by `pack`.
        dropped: called in any thread when the last of the arrays is gone.
    """
    in_file = _is_on_disk(parcel.descriptor)
    try:
        pages = mmap.mmap(parcel.descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    finally:
        parcel.close()
    weakref.finalize(pages, dropped).atexit = False
    content = np.frombuffer(pages, np.uint8)
    index = _decode(pages[parcel.index_offset :])
    replicas: list[Replica] = []
    for entry in index:
        dtype = dtype_of(entry.dtype)
        end = entry.offset + math.prod(entry.shape) * dtype.itemsize
        data = content[entry.offset : end].view(dtype).reshape(entry.shape)
        replicas.append(Replica(entry.array, entry.box, data, entry.proof, in_file))
    return replicas
