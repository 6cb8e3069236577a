"""Checkpoints on disk, as the controller sees them: which files are missing, and who commits.

    begin -> every host writes its file -> all written -> one host commits -> answered
                     |                                          |
                     +-- one could not, or was lost -> one host removes the rest -> answered with why

Arrays that cannot be written may have been, for an earlier controller that did not live to say so: then one
host looks whether the checkpoint is at its path, and removes what there is of it if it is not.

Nothing is removed before every host that is there has said what became of its file; one that was given up
and writes nevertheless is told when it says so. Who is to remove it may end before that, or nobody may be there
who could: so an island that wrote it is told once more when it is formed again. Checkpoints to the same path
are committed in the order in which they were begun, so the later one stays.
"""

from __future__ import annotations

from dataclasses import dataclass

from pw.core.actor import Env
from pw.core.copying import OBJECTS, weight_of
from pw.core.errors import ArgumentError, ErrorReport, HostLost, ProtocolError
from pw.core.ids import scheduler_of, store_of
from pw.core.messages import (
    AbandonFiles,
    Answered,
    CommitFiles,
    Copy,
    CopyArrays,
    CopyFile,
    Directory,
    FilesCommitted,
    FileWritten,
    IslandFormed,
    SaveArrays,
)
from pw.core.sharding import ArraySpec, DeviceAddress
from pw.sched.control.checkpoints.replicas import objection
from pw.sched.control.clients import Client
from pw.sched.control.ledger import Ledger

LEFTOVERS_KEPT = 1000
"""Checkpoints that were given up, and of which something may be left."""


@dataclass(slots=True)
class _Save:
    client: Client
    message: SaveArrays
    files: dict[str, str]
    """What each host writes; nothing if it is only looked whether it is at its path already."""
    islands: dict[str, str]
    """Where each host is."""
    missing: set[str]
    """Hosts that have not said what became of their file."""
    present: list[str]
    """Hosts that are there: one of them commits."""
    error: ErrorReport | None = None
    committing: bool = False


class Saves:
    """The checkpoints that are being written to disk."""

    def __init__(self, env: Env, ledger: Ledger) -> None:
        self._env = env
        self._ledger = ledger
        self._saves: dict[str, _Save] = {}
        """By id, in the order in which they were begun."""
        self._hosts: tuple[str, ...] = ()
        self._leftovers: dict[str, tuple[str, frozenset[str]]] = {}
        """Paths of those that were given up, by id, and the islands that wrote them; none: any can look."""

    def must_wait(self, message: SaveArrays) -> bool:
        """Whether another one is being put in its place at the same path.

        The host that does so removes what has been left behind there, and would take for that what is
        written by one of which it has not been told.
        """
        return any(
            save.committing and save.message.path == message.path for save in self._saves.values()
        )

    def begin(self, client: Client, message: SaveArrays) -> None:
        """Have every box of the arrays written once, after the client's earlier work."""
        if not self._makes_sense(message):
            refused = ErrorReport.of(ProtocolError("that is no checkpoint that can be written"))
            self._env.send(client.address, Answered(message.request, refused))
            return
        error = self._objection(client, message)
        if error is not None:
            client.unanswered[SaveArrays] += 1
            self._saves[message.checkpoint] = _Save(
                client, message, {}, {}, set(), list(self._hosts), error
            )
            self._proceed()
            return
        self._leftovers.pop(message.checkpoint, None)
        parts: dict[str, tuple[list[str], list[Copy]]] = {}
        sizes_bytes: dict[str, int] = {}
        islands: dict[str, str] = {}
        for number, name in zip(message.arrays, message.names, strict=True):
            array = client.arrays[number]
            spec = array.spec
            devices = self._ledger.located(spec)
            for host, positions in self._divide(spec, devices, sizes_bytes).items():
                islands[host] = array.island
                names, copies = parts.setdefault(host, ([], []))
                names.append(name)
                copies.append(Copy(number, spec, devices, positions, ()))
        many = next(
            (names for names, copies in parts.values() if weight_of(copies) > OBJECTS), None
        )
        if many is not None:
            words = f"a host would have to write {len(many)} arrays at once; make several checkpoints of them"
            answer = Answered(message.request, ErrorReport.of(ArgumentError(words)))
            self._env.send(client.address, answer)
            return
        files = {
            host: f"{message.checkpoint}-{at:05d}.safetensors" for at, host in enumerate(parts)
        }
        by_island: dict[str, list[tuple[str, CopyFile]]] = {}
        for host, (names, copies) in parts.items():
            where = (message.checkpoint, message.path, message.overwrite, files[host])
            file = CopyFile(*where, tuple(names), tuple(copies))
            by_island.setdefault(islands[host], []).append((host, file))
        for island, theirs in by_island.items():
            self._env.send(scheduler_of(island), CopyArrays(client.number, (), tuple(theirs)))
        self._saves[message.checkpoint] = _Save(
            client, message, files, islands, set(files), list(files)
        )
        client.unanswered[SaveArrays] += 1

    def _makes_sense(self, message: SaveArrays) -> bool:
        id_ = message.checkpoint
        return (
            8 <= len(id_) <= 64
            and set(id_) <= set("0123456789abcdef")
            and id_ not in self._saves
            and bool(message.arrays)
            and len(message.arrays) == len(message.names)
            and message.path.startswith("/")
        )

    def _objection(self, client: Client, message: SaveArrays) -> ErrorReport | None:
        """Why arrays cannot be written."""
        for number in message.arrays:
            error = objection(client, number, client.arrays.get(number))
            if error is not None:
                return error
        return None

    def _divide(
        self, spec: ArraySpec, devices: tuple[DeviceAddress, ...], sizes_bytes: dict[str, int]
    ) -> dict[str, tuple[int, ...]]:
        """For each host the mesh positions whose boxes it writes; of those that could, the one with least."""
        chosen: dict[str, list[int]] = {}
        for _, positions in spec.distinct_boxes():
            at = min(positions, key=lambda at: sizes_bytes.get(devices[at].host, 0))
            host = devices[at].host
            sizes_bytes[host] = sizes_bytes.get(host, 0) + spec.shard_bytes
            chosen.setdefault(host, []).append(at)
        return {host: tuple(positions) for host, positions in chosen.items()}

    # --- what becomes of it ----------------------------------------------------------------------------

    def written(self, host: str, message: FileWritten) -> None:
        """A host has written its file, or cannot."""
        save = self._saves.get(message.checkpoint)
        if save is None:
            self._env.send(store_of(host), AbandonFiles(message.checkpoint, message.path))
            return
        save.error = save.error or message.error
        save.missing.discard(host)
        self._proceed()

    def committed(self, message: FilesCommitted) -> None:
        """A host has put a checkpoint in its place, or cannot."""
        save = self._saves.pop(message.checkpoint, None)
        if save is None:
            self._env.count("messages_stale")
            return
        self._answer(save, message.error)
        self._proceed()

    def hosts_are(self, directory: Directory) -> None:
        """These hosts can look at a path."""
        self._hosts = tuple(peer.node for peer in directory.peers)

    def island_formed(self, message: IslandFormed) -> None:
        """Have it remove what its hosts may have left when they ended."""
        for id_, (path, islands) in list(self._leftovers.items()):
            if message.island in islands or not islands:
                del self._leftovers[id_]
                self._env.send(store_of(message.hosts[0]), AbandonFiles(id_, path))

    def host_lost(self, node: str) -> None:
        """It will not write, and not commit."""
        for save in self._saves.values():
            if node in save.present:
                save.committing = save.committing and node != save.present[0]
                save.present.remove(node)
                if not save.present:
                    save.error = save.error or _lost(node)
                self._lose(save, node)
        self._proceed()

    def island_lost(self, island: str) -> None:
        """Its hosts leave; what they were to write they may not have heard of."""
        for save in self._saves.values():
            for host in [host for host in save.missing if save.islands[host] == island]:
                self._lose(save, host)
        self._proceed()

    def _lose(self, save: _Save, host: str) -> None:
        if host in save.missing:
            save.missing.discard(host)
            save.error = save.error or _lost(host)

    def client_left(self, client: Client) -> None:
        """What it asked for may not reach the hosts any more; only what is complete is seen through."""
        gone = [id_ for id_, save in self._saves.items() if save.client is client]
        for id_ in gone:
            if not self._saves[id_].committing:
                self._abandon(id_, self._saves.pop(id_))
        self._proceed()

    def _proceed(self) -> None:
        """Commit what is complete, give up what cannot be."""
        paths: set[str] = set()
        for id_, save in list(self._saves.items()):
            message = save.message
            if save.missing or save.committing:
                paths.add(message.path)
            elif save.error is not None and not save.files and save.present:
                save.committing = True
                look = AbandonFiles(id_, message.path, save.error)
                self._env.send(store_of(save.present[0]), look)
            elif save.error is not None:
                del self._saves[id_]
                self._abandon(id_, save)
                self._answer(save, save.error)
            elif message.path not in paths:
                paths.add(message.path)
                save.committing = True
                others = tuple(
                    other for other, s in self._saves.items() if s.message.path == message.path
                )
                commit = CommitFiles(
                    id_,
                    message.path,
                    message.overwrite,
                    tuple(save.files.values()),
                    message.tree,
                    others,
                )
                self._env.send(store_of(save.present[0]), commit)

    def _abandon(self, id_: str, save: _Save) -> None:
        self._leftovers[id_] = save.message.path, frozenset(save.islands.values())
        if len(self._leftovers) > LEFTOVERS_KEPT:
            del self._leftovers[next(iter(self._leftovers))]
        if save.present:
            self._env.send(store_of(save.present[0]), AbandonFiles(id_, save.message.path))

    def _answer(self, save: _Save, error: ErrorReport | None) -> None:
        save.client.unanswered[SaveArrays] -= 1
        self._env.count("checkpoints_written" if error is None else "checkpoints_not_written")
        if self._ledger.clients.get(save.client.number) is save.client:
            self._env.send(save.client.address, Answered(save.message.request, error))


def _lost(host: str) -> ErrorReport:
    return ErrorReport.of(HostLost(f"host {host} was lost while it wrote a checkpoint to disk"))
