"""A host's part in checkpoints on disk: it writes the shards that are here, and reads those that belong here.

Shards are read from the devices in launch order, after the launches that make them and before those
that they are donated to. The file is written when all of them are in host memory. The controller
hears when the file is on disk, and has one host commit when all files are. The disk itself is
`pw.devices.host.checkpoint_format`; its calls block, so the process lends threads for them (`BlockingCalls`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.errors import ArrayLost, CheckpointFailed, ErrorReport
from pw.core.ids import CONTROL, CONTROLLER, Address
from pw.core.sharding import ArraySpec, Box
from pw.devices.host import checkpoint_format, checkpoint_paths
from pw.devices.host import checkpoint_reader as disk_reader
from pw.devices.host.backend import Read, relative
from pw.devices.host.clients import Clients
from pw.devices.host.value import Value

DoneReading = Callable[[list[np.ndarray[Any, Any]] | ErrorReport], None]
"""Called with the boxes, or with the error of one of them."""

READERS = 4
"""Arrays that are read at the same time, so that the disk is busy."""


class BlockingCalls(Protocol):
    """Threads for calls that block; a call may overtake others."""

    def call(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Call `done` on the loop thread with what `work` returns, or with the exception it raises."""


@dataclass(slots=True)
class _FileRead:
    """Boxes that are to be read."""

    source: msg.FileSource
    spec: ArraySpec
    boxes: Sequence[Box]
    done: DoneReading


class Files(Part):
    """Writes and reads the files of checkpoints.

    Args:
        env: the store's.
        aside: threads for blocking calls; without them, every request is refused.
        clients: the clients that this host knows.
        root: the folder in which checkpoints must lie, without symbolic links; empty if they may be anywhere.
    """

    def __init__(
        self, env: Env, aside: BlockingCalls | None, clients: Clients, root: str = ""
    ) -> None:
        self._root = root
        self._env = env
        self._aside = aside
        self._clients = clients
        self._host = env.address.node
        self._reads: dict[tuple[str, str], list[_FileRead]] = {}
        """The reads of this turn, by path and checkpoint."""

    def _call(self, work: Callable[[], Any], done: Callable[[Any | ErrorReport], None]) -> None:
        """Call `work` on another thread, and `done` with its result or its error."""

        def ended(result: Any) -> None:
            if isinstance(result, BaseException):
                result = ErrorReport.of(result, self._host, CheckpointFailed)
            done(result)

        if self._aside is None:
            ended(CheckpointFailed("this host neither writes nor reads files; leave out path="))
        else:
            self._aside.call(work, ended)

    def write(self, job: msg.CopyFile, values: Sequence[Value | None]) -> list[Read]:
        """Return the ops that read the shards of a file; it is written when all are read."""
        shards: list[list[checkpoint_format.Shard]] = [[] for _ in job.copies]
        missing = set(range(len(job.copies)))
        failed = False

        def fail(error: ErrorReport) -> None:
            nonlocal failed
            if not failed:
                failed = True
                shards.clear()
                self._env.send(CONTROL, msg.FileWritten(job.checkpoint, job.path, error))

        def read(index: int, views: list[np.ndarray[Any, Any]] | ErrorReport) -> None:
            if failed:
                return
            if isinstance(views, ErrorReport):
                fail(views)
                return
            copy, name = job.copies[index], job.names[index]
            boxes = [copy.spec.box(position) for position in copy.positions]
            shards[index] = [
                checkpoint_format.Shard(name, copy.spec, box, view)
                for box, view in zip(boxes, views, strict=True)
            ]
            missing.discard(index)
            if not missing:
                everything = [shard for part in shards for shard in part]
                self._call(partial(checkpoint_format.write, job, everything, self._root), written)

        def written(result: ErrorReport | None) -> None:
            self._env.count("files_written" if result is None else "files_failed")
            self._env.send(CONTROL, msg.FileWritten(job.checkpoint, job.path, result))

        if None in values:
            names = ", ".join(job.names[:8])
            words = f"an array of the checkpoint {job.path!r} is not on this host any more; it has {names}"
            fail(ErrorReport.of(ArrayLost(words), self._host))
            return []
        reads = []
        for index, (copy, value) in enumerate(zip(job.copies, values, strict=True)):
            assert value is not None
            wanted = [(at, relative(copy.spec.box(at))) for at in copy.positions]
            reads.append(Read(value, wanted, copy.spec, copy.devices, partial(read, index)))
        return reads

    @handles(msg.CommitFiles)
    def _commit(self, sender: Address, message: msg.CommitFiles) -> None:
        if not self._from_controller(sender):
            return

        def committed(result: ErrorReport | None) -> None:
            self._env.send(CONTROL, msg.FilesCommitted(message.checkpoint, result))

        self._call(partial(checkpoint_format.commit, message, self._root), committed)

    @handles(msg.AbandonFiles)
    def _abandon(self, sender: Address, message: msg.AbandonFiles) -> None:
        if not self._from_controller(sender):
            return

        def abandoned(result: bool | ErrorReport) -> None:
            if isinstance(result, ErrorReport):
                self._env.log("warning", "cannot remove files of a checkpoint", why=result.message)
            if message.unless is not None:
                error = None if result is True else message.unless
                self._env.send(CONTROL, msg.FilesCommitted(message.checkpoint, error))

        abandon = partial(checkpoint_format.abandon, message.path, message.checkpoint, self._root)
        self._call(abandon, abandoned)

    @handles(msg.LookForFolders)
    def _look(self, sender: Address, message: msg.LookForFolders) -> None:
        if not self._from_controller(sender):
            return

        def looked(result: tuple[str, ...] | ErrorReport) -> None:
            paths = () if isinstance(result, ErrorReport) else result
            self._env.send(CONTROL, msg.FoldersGone(message.look, paths))

        self._call(partial(checkpoint_paths.missing, message.paths, self._root), looked)

    def _from_controller(self, sender: Address) -> bool:
        if sender.node != CONTROLLER:
            self._env.count("messages_refused")
        return sender.node == CONTROLLER

    @handles(msg.Describe)
    def _describe(self, sender: Address, message: msg.Describe) -> None:
        if self._clients.at(sender.node) is None:
            self._env.send(sender, msg.RequestFailed(message.request, self._clients.refusal()))
            return

        def described(result: tuple[str, bytes] | ErrorReport) -> None:
            if isinstance(result, ErrorReport):
                self._env.send(sender, msg.RequestFailed(message.request, result))
            else:
                self._env.send(sender, msg.Described(message.request, *result))

        self._call(partial(checkpoint_format.describe, message.path, self._root), described)

    def read(
        self, source: msg.FileSource, spec: ArraySpec, boxes: Sequence[Box], done: DoneReading
    ) -> None:
        """Read boxes of an array at the end of this turn; `done` is called later."""
        read = _FileRead(source, spec, boxes, done)
        self._reads.setdefault((source.path, source.checkpoint), []).append(read)

    def read_all(self) -> None:
        """Begin the reads of this turn, those of one checkpoint together: each file is opened once."""
        everything, self._reads = self._reads, {}
        for (path, checkpoint), reads in everything.items():
            for index in range(min(READERS, len(reads))):
                self._read_next(path, checkpoint, None, reads[index::READERS])

    def _read_next(
        self,
        path: str,
        checkpoint: str,
        reader: disk_reader.CheckpointReader | None,
        reads: list[_FileRead],
    ) -> None:
        """Read one array; read the next when this one is on its way to the devices."""
        head, *rest = reads

        def work() -> tuple[disk_reader.CheckpointReader, list[np.ndarray[Any, Any]]]:
            opened = reader or disk_reader.CheckpointReader(path, checkpoint, self._root)
            return opened, opened.read(head.source, head.spec, head.boxes)

        def done(
            result: tuple[disk_reader.CheckpointReader, list[np.ndarray[Any, Any]]] | ErrorReport,
        ) -> None:
            opened = reader
            if isinstance(result, ErrorReport):
                head.done(result)
            else:
                opened, boxes = result
                self._env.count("arrays_read_from_files")
                head.done(boxes)
            if rest:
                self._read_next(path, checkpoint, opened, rest)

        self._call(work, done)
