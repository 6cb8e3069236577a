"""The boxes of replicas on this host: those in memory, and those in files.

A replica in a file is a view of the mapped file (`pw.devices.host.spill_files`), and is read as one in
memory. Replicas go to files for two reasons:

- the controller has asked for it (`ask`),
- replicas in memory have more bytes than `--spill` has; then the oldest go.

One file is written after the other, on another thread. A file has all boxes of one array that are in memory
when it begins. A box is replaced by its view when the file is complete, if it is still the same box. The
file is deleted when no box in it is held any more. If it cannot be written, the boxes stay in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pw.core.actors.actor import Env
from pw.core.errors import ErrorReport
from pw.core.landing import Bytes
from pw.core.sharding import Box, DeviceAddress
from pw.devices.host.spill_files import SpillFiles

Key = tuple[int, Box]
"""An array, and a box of it."""


@dataclass(slots=True, eq=False)
class _BoxFile:
    """A file, and how many boxes in it are held."""

    payload: Any
    """The file as `SpillFiles` has written it; None for the one that the last incarnation has left."""
    boxes: int = 0


class HeldBoxes:
    """The boxes of all replicas on a host.

    Args:
        env: the store's.
        files: where boxes go that leave memory; None if they stay there.
        spill_bytes: bytes of boxes that may stay in memory; 0 for any number.
        settled: called after a file, when the boxes of all arrays that were asked for are in files or stay in
            memory.
    """

    def __init__(
        self, env: Env, files: SpillFiles | None, spill_bytes: int, settled: Callable[[], None]
    ) -> None:
        self.memory_bytes = 0
        """Bytes of the boxes that are in memory."""
        self.file_bytes = 0
        """Bytes of the boxes that are in files."""
        self._env = env
        self._folder = files
        self._spill_bytes = spill_bytes
        self._settled = settled
        self._boxes: dict[int, dict[Box, Bytes]] = {}
        self._in_memory: dict[Key, None] = {}
        """The boxes in memory, the oldest first."""
        self._files: dict[Key, _BoxFile] = {}
        """The files of the others."""
        self._asked: dict[int, None] = {}
        """Arrays that were asked for and are not in files yet."""
        self._failed: set[int] = set()
        """Arrays whose file could not be written; they are not tried again by themselves."""
        self.is_writing = False
        """True while a file is being written."""
        self._has_warned = False
        """True if a file could not be written, or there is no folder, and the log says so."""

    def __len__(self) -> int:
        return len(self._boxes)

    def of(self, array: int) -> Mapping[Box, Bytes]:
        """Return the boxes of an array."""
        return self._boxes.get(array, {})

    def arrays(self) -> list[int]:
        """Return the arrays that have boxes here."""
        return list(self._boxes)

    def all(self) -> Iterator[tuple[Key, Bytes, bool]]:
        """Yield each box, its bytes and whether it is in a file; those in files first."""
        for key in (*self._files, *self._in_memory):
            array, box = key
            yield key, self._boxes[array][box], key in self._files

    # --- boxes come and go ---------------------------------------------------------------------------

    def inherit(self, array: int, box: Box, data: Bytes, *, in_file: bool) -> None:
        """Add a box of the last incarnation; it may be in a file that goes with its last view."""
        if in_file:
            self._boxes.setdefault(array, {})[box] = data
            self._put_in(array, box, data, _BoxFile(None))
        else:
            self.put(array, box, data)

    def put(self, array: int, box: Box, data: Bytes) -> None:
        """Add a box in memory, in place of an earlier one; one in a file stays, as arrays do not change."""
        if (array, box) in self._files:
            return
        boxes = self._boxes.setdefault(array, {})
        if (earlier := boxes.get(box)) is not None:
            self.memory_bytes -= earlier.nbytes
        boxes[box] = data
        self.memory_bytes += data.nbytes
        self._in_memory[array, box] = None

    def remove(self, array: int, box: Box) -> None:
        """Drop a box, and its file with the last box in it."""
        boxes = self._boxes[array]
        size_bytes = boxes.pop(box).nbytes
        file = self._files.pop((array, box), None)
        if file is None:
            del self._in_memory[array, box]
            self.memory_bytes -= size_bytes
        else:
            self.file_bytes -= size_bytes
            file.boxes -= 1
            if not file.boxes and file.payload is not None:
                self.delete_file(file.payload)
        if not self._boxes_in_memory(array):
            self._asked.pop(array, None)
        if not boxes:
            del self._boxes[array]
            self._failed.discard(array)

    def delete_file(self, payload: Any) -> None:
        """Delete a file of which no box is held any more."""
        assert self._folder is not None
        self._folder.delete(payload)

    # --- to files ------------------------------------------------------------------------------------

    def ask(self, array: int) -> bool:
        """Have the boxes of an array go to a file; return False if they are there, or stay in memory."""
        if self._folder is None:
            if not self._has_warned:
                self._has_warned = True
                words = "this worker has no folder for files (--spill-files)"
                self._env.log("info", "copies stay in host memory", why=words)
            return False
        if not self._boxes_in_memory(array):
            return False
        self._failed.discard(array)
        self._asked[array] = None
        return True

    def write_next(self) -> None:
        """Begin the next file, unless one is being written or none is needed."""
        if self._folder is None or self.is_writing:
            return
        array = self._next()
        if array is not None:
            self._write(self._folder, array)

    def _next(self) -> int | None:
        """Return the array whose boxes go to a file next."""
        arrays: Iterator[int] = iter(self._asked)
        if not self._asked and self._spill_bytes and self.memory_bytes > self._spill_bytes:
            arrays = (array for array, _ in self._in_memory if array not in self._failed)
        return next((array for array in arrays if self._boxes_in_memory(array)), None)

    def _boxes_in_memory(self, array: int) -> dict[Box, Bytes]:
        """Return the boxes of an array that can go to a file."""
        boxes = self._boxes.get(array, {})
        return {
            box: data
            for box, data in boxes.items()
            if data.nbytes and (array, box) not in self._files
        }

    def _write(self, folder: SpillFiles, array: int) -> None:
        boxes = self._boxes_in_memory(array)
        parts = [((at,), ((0, data.nbytes),), data) for at, data in enumerate(boxes.values())]
        host = self._env.address.node
        devices = tuple([DeviceAddress(host, at) for at in range(len(parts))])
        self.is_writing = True

        def written(payload: Any) -> None:
            self.is_writing = False
            if isinstance(payload, ErrorReport):
                self._failed_to_write(array, payload)
            else:
                file = _BoxFile(payload)
                for at, (box, data) in enumerate(boxes.items()):
                    if self._boxes.get(array, {}).get(box) is data:
                        self._move(array, box, folder.view(payload, at), file)
                if not file.boxes:
                    self.delete_file(payload)  # all of it was dropped, or replaced, meanwhile
            if array in self._failed or not self._boxes_in_memory(array):
                self._asked.pop(array, None)
            self.write_next()
            if not self._asked:
                self._settled()

        folder.write(parts, devices, written)

    def _failed_to_write(self, array: int, error: ErrorReport) -> None:
        self._env.count("files_of_arrays_failed")
        if array in self._boxes:
            self._failed.add(array)
        if not self._has_warned:
            self._has_warned = True
            self._env.log("warning", "copies stay in host memory", why=error.message)

    def _move(self, array: int, box: Box, view: Bytes, file: _BoxFile) -> None:
        """Replace a box in memory by a view of its file."""
        del self._in_memory[array, box]
        self.memory_bytes -= view.nbytes
        self._boxes[array][box] = view
        self._put_in(array, box, view, file)
        self._env.count("file_bytes_written", view.nbytes)

    def _put_in(self, array: int, box: Box, view: Bytes, file: _BoxFile) -> None:
        self._files[array, box] = file
        file.boxes += 1
        self.file_bytes += view.nbytes
