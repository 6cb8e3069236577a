"""Checkpoints on disk at the controller: which files are missing, and which host commits.

    begin -> each host writes its file -> all are written -> one host commits -> answered
                 |                                          |
                 +-- a host cannot, or is lost -> one host removes the rest -> an error

If arrays cannot be written, an earlier controller may have had them written, and may have been lost
before it answered. Then one host looks whether the checkpoint is at its path. If it is not, the
host removes what there is of it.

The rest is removed only when every host that is there has reported its file. A host that was given
up and writes nevertheless is told to remove its file when it reports it. The host that is to remove
the rest may be lost first: so each island that wrote it is told again when it is formed again.
Checkpoints to the same path are committed in the order in which they were begun, so that the later
one stays.
"""

from __future__ import annotations

from dataclasses import dataclass

from pw.core import messages as msg
from pw.core.actors.actor import handles
from pw.core.errors import ArgumentError, ErrorReport, HostLost, ProtocolError, QuotaExceeded
from pw.core.ids import Address, scheduler_of, store_of
from pw.core.messages.copying import OBJECTS, weight_of
from pw.core.sharding import ArraySpec, DeviceAddress
from pw.sched.control.checkpoints.disk_table import DiskTable
from pw.sched.control.checkpoints.in_memory import objection
from pw.sched.control.clients import Client
from pw.sched.control.sessions import ControlPart, handles_host

LEFTOVERS_KEPT = 1000
"""Number of abandoned checkpoints of which files may be left."""


@dataclass(slots=True, eq=False)
class _Save:
    client: Client
    message: msg.SaveArrays
    files: dict[str, str]
    """File of each host; empty if the host only looks whether the checkpoint is at its path."""
    islands: dict[str, str]
    """Island of each host."""
    missing: set[str]
    """Names of hosts that have not reported their file."""
    present: list[str]
    """Names of hosts that are there: the first of them commits."""
    error: ErrorReport | None = None
    committing: bool = False
    may_be_there: bool = False
    """True if a host was lost while it put the checkpoint in its place."""
    size_bytes: int = 0
    """Bytes of all files."""


@dataclass(eq=False)
class Saves(ControlPart):
    """Checkpoints that are being written to disk."""

    disk: DiskTable

    def __post_init__(self) -> None:
        super().__post_init__()
        self.under_way: dict[str, _Save] = {}
        """Checkpoints that are being written, by id, in the order in which they were begun."""
        self._hosts: tuple[str, ...] = ()
        self.leftovers: dict[str, tuple[str, frozenset[str]]] = {}
        """Paths of abandoned checkpoints, by id, with the islands that wrote them, if any did."""

    def count(self, client: Client) -> int:
        """Return how many checkpoints of a client are being written."""
        return sum(save.client is client for save in self.under_way.values())

    def left(self, client: Client) -> int:
        """Return how many files its checkpoints still wait for."""
        return sum(len(save.missing) for save in self.under_way.values() if save.client is client)

    def commits_at(self, path: str) -> bool:
        """Return whether a host is putting a checkpoint in its place at `path`.

        That host removes what has been left behind there. It would remove the files of a newer
        checkpoint, which it does not know.
        """
        return any(
            save.committing and save.message.path == path for save in self.under_way.values()
        )

    def begin(self, client: Client, message: msg.SaveArrays) -> None:
        """Have each box of the arrays written once, after the client's earlier work."""
        if not self._makes_sense(message):
            refused = ErrorReport.of(
                ProtocolError("this checkpoint has no arrays, or a bad id or path")
            )
            self.sessions.tell(client, msg.Answered(message.request, refused))
            return
        objections = (objection(client, number, self._islands) for number in message.arrays)
        error = next((error for error in objections if error is not None), None)
        if error is not None:
            self.under_way[message.checkpoint] = _Save(
                client, message, {}, {}, set(), list(self._hosts), error
            )
            self._proceed()
            return
        self.leftovers.pop(message.checkpoint, None)
        parts: dict[str, tuple[list[str], list[msg.ArrayCopy]]] = {}
        sizes_bytes: dict[str, int] = {}
        islands: dict[str, str] = {}
        for number, name in zip(message.arrays, message.names, strict=True):
            array = client.arrays.held[number]
            spec = array.spec
            devices = self._islands.located(spec)
            for host, positions in self._divide(spec, devices, sizes_bytes).items():
                islands[host] = array.island
                names, copies = parts.setdefault(host, ([], []))
                names.append(name)
                copies.append(msg.ArrayCopy(number, spec, devices, positions))
        many = next(
            (names for names, copies in parts.values() if weight_of(copies) > OBJECTS), None
        )
        if many is not None:
            words = (
                f"a host would have to write {len(many)} arrays at once; make several checkpoints"
            )
            answer = msg.Answered(message.request, ErrorReport.of(ArgumentError(words)))
            self.sessions.tell(client, answer)
            return
        files = {
            host: f"{message.checkpoint}-{at:05d}.safetensors" for at, host in enumerate(parts)
        }
        size_bytes = sum(sizes_bytes.values())
        try:
            self.disk.take(client.tenant, message, size_bytes, next(iter(files)))
        except QuotaExceeded as exceeded:
            answer = msg.Answered(message.request, ErrorReport.of(exceeded))
            self.sessions.tell(client, answer)
            return
        by_island: dict[str, list[tuple[str, msg.CopyFile]]] = {}
        for host, (names, copies) in parts.items():
            where = (message.checkpoint, message.path, message.overwrite, files[host])
            file = msg.CopyFile(*where, tuple(names), tuple(copies))
            by_island.setdefault(islands[host], []).append((host, file))
        for island, theirs in by_island.items():
            self._env.send(scheduler_of(island), msg.CopyArrays(client.number, (), tuple(theirs)))
        self.under_way[message.checkpoint] = _Save(
            *(client, message, files, islands, set(files), list(files)), size_bytes=size_bytes
        )

    def _makes_sense(self, message: msg.SaveArrays) -> bool:
        id_ = message.checkpoint
        return (
            8 <= len(id_) <= 64
            and set(id_) <= set("0123456789abcdef")
            and id_ not in self.under_way
            and bool(message.arrays)
            and len(message.arrays) == len(message.names)
            and message.path.startswith("/")
        )

    def _divide(
        self, spec: ArraySpec, devices: tuple[DeviceAddress, ...], sizes_bytes: dict[str, int]
    ) -> dict[str, tuple[int, ...]]:
        """Return the positions whose boxes each host writes; the host with the least takes more."""
        chosen: dict[str, list[int]] = {}
        for _, positions in spec.distinct_boxes():
            at = min(positions, key=lambda at: sizes_bytes.get(devices[at].host, 0))
            host = devices[at].host
            sizes_bytes[host] = sizes_bytes.get(host, 0) + spec.shard_bytes
            chosen.setdefault(host, []).append(at)
        return {host: tuple(positions) for host, positions in chosen.items()}

    # --- what becomes of it -----------------------------------------------------------------------

    @handles_host(msg.FileWritten)
    def _written(self, host: str, message: msg.FileWritten) -> None:
        """A host has written its file, or cannot."""
        save = self.under_way.get(message.checkpoint)
        if save is None:
            self._env.send(store_of(host), msg.AbandonFiles(message.checkpoint, message.path))
            return
        save.error = save.error or message.error
        save.missing.discard(host)
        self._proceed()

    @handles_host(msg.FilesCommitted)
    def _committed(self, host: str, message: msg.FilesCommitted) -> None:
        """A host has put a checkpoint in its place, or cannot."""
        save = self.under_way.pop(message.checkpoint, None)
        if save is None:
            self._env.count("messages_stale")
            return
        if message.error is None:
            save.client.usage.stored_bytes += save.size_bytes
        self._settle(save, is_there=message.error is None)
        self._answer(save, message.error)
        self._proceed()

    @handles(msg.Directory)
    def _hosts_are(self, sender: Address, directory: msg.Directory) -> None:
        self._hosts = tuple(peer.node for peer in directory.peers)

    @handles(msg.IslandFormed)
    def _island_formed(self, sender: Address, message: msg.IslandFormed) -> None:
        """Have an island remove files that its hosts may have left when they were lost."""
        for id_, (path, islands) in list(self.leftovers.items()):
            if message.island in islands or not islands:
                del self.leftovers[id_]
                self._env.send(store_of(message.hosts[0]), msg.AbandonFiles(id_, path))

    def host_lost(self, node: str) -> None:
        """A host does not write and does not commit any more."""
        for save in self.under_way.values():
            if node in save.present:
                if save.committing and node == save.present[0]:
                    save.committing, save.may_be_there = False, True
                save.present.remove(node)
                if not save.present:
                    save.error = save.error or _lost(node)
                self._lose(save, node)
        self._proceed()

    @handles(msg.EpochEnded)
    def _epoch_ended(self, sender: Address, message: msg.EpochEnded) -> None:
        """Do not wait for the hosts of a lost island: they may not have got the order to write."""
        for save in self.under_way.values():
            for host in [host for host in save.missing if save.islands[host] == message.island]:
                self._lose(save, host)
        self._proceed()

    def _lose(self, save: _Save, host: str) -> None:
        if host in save.missing:
            save.missing.discard(host)
            save.error = save.error or _lost(host)

    def client_left(self, client: Client) -> None:
        """Abandon the checkpoints of a client, except those that are being committed."""
        gone = [id_ for id_, save in self.under_way.items() if save.client is client]
        for id_ in gone:
            if not self.under_way[id_].committing:
                self._abandon(id_, self.under_way.pop(id_))
        self._proceed()

    def _proceed(self) -> None:
        """Commit the checkpoints that are complete; abandon those that cannot be."""
        paths: set[str] = set()
        for id_, save in list(self.under_way.items()):
            message = save.message
            if save.missing or save.committing:
                paths.add(message.path)
            elif save.error is not None and not save.files and save.present:
                save.committing = True
                look = msg.AbandonFiles(id_, message.path, save.error)
                self._env.send(store_of(save.present[0]), look)
            elif save.error is not None:
                del self.under_way[id_]
                self._abandon(id_, save)
                self._answer(save, save.error)
            elif message.path not in paths:
                paths.add(message.path)
                save.committing = True
                same_path = tuple(
                    other for other, s in self.under_way.items() if s.message.path == message.path
                )
                commit = msg.CommitFiles(
                    id_,
                    message.path,
                    message.overwrite,
                    tuple(save.files.values()),
                    message.tree,
                    same_path,
                )
                self._env.send(store_of(save.present[0]), commit)

    def _settle(self, save: _Save, *, is_there: bool | None) -> None:
        """Count the bytes of a save, or give them back; of one that only looks, none were taken."""
        if save.files:
            self.disk.settle(save.client.tenant, save.message, is_there=is_there)

    def _abandon(self, id_: str, save: _Save) -> None:
        self._settle(save, is_there=None if save.may_be_there else False)
        self.leftovers[id_] = save.message.path, frozenset(save.islands.values())
        if len(self.leftovers) > LEFTOVERS_KEPT:
            del self.leftovers[next(iter(self.leftovers))]
        if save.present:
            self._env.send(store_of(save.present[0]), msg.AbandonFiles(id_, save.message.path))

    def _answer(self, save: _Save, error: ErrorReport | None) -> None:
        self._env.count("checkpoints_written" if error is None else "checkpoints_not_written")
        if self.sessions.get(save.client.number) is save.client:
            self._env.send(save.client.address, msg.Answered(save.message.request, error))


def _lost(host: str) -> ErrorReport:
    return ErrorReport.of(HostLost(f"host {host} was lost while it wrote a checkpoint to disk"))
