"""Bytes on disk of the checkpoints of tenants that have a bound (the right `disk`).

A save takes its bytes before a host writes one of them (`take`), and gives them back if it fails (`settle`).
While a save replaces a checkpoint, the larger of the two counts. Users delete checkpoints themselves, so the
table outlives clients, and hosts look whether the folders are still there: once a minute, and for a minute
after a refusal every two seconds. The host that wrote a checkpoint looks, or another one if that host is not
connected. No save waits for a look.

Changes go to the file of accounts, so that a later controller goes on from them. Where a crash leaves it open
which of two checkpoints is at a path, the larger one counts; if it is open whether there is one, it counts
until a look.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from pw.core import messages as msg
from pw.core.accounts import AccountSink, FolderEntry
from pw.core.actors.actor import handles
from pw.core.actors.ticker import Ticker
from pw.core.errors import QuotaExceeded
from pw.core.ids import Address, store_of
from pw.core.rights import Resource, in_words
from pw.core.sizes import size_in_words
from pw.sched.control.sessions import ControlPart, handles_host

LOOK_S = 60.0
"""Seconds between two looks, and for which looks are frequent after a refusal."""
SOON_S = 2.0
"""Seconds between two looks after a refusal."""
PATHS_AT_ONCE = 256
"""Number of folders that a host looks for at once, at most."""
LOOKS = 1 << 20
"""Numbers of looks that a controller has for each of its client numbers: an answer that was for an earlier
controller is none of this one."""


@dataclass(slots=True, eq=False)
class _Folder:
    """A path at which a tenant has a checkpoint, or saves one."""

    host: str
    """Name of a host that wrote the checkpoint, or writes it."""
    size_bytes: int = 0
    """Bytes of the checkpoint at the path; 0 if there is none."""
    version: int = 0
    """Number of the checkpoint at the path, among all that were committed."""
    saves: dict[str, int] = field(default_factory=dict)
    """Bytes of each save under way, by the id of its checkpoint."""
    kept_bytes: int = 0
    """Bytes in the last entry of the accounts."""

    @property
    def counted_bytes(self) -> int:
        """Bytes that the tenant has for this path."""
        return max(self.size_bytes, *self.saves.values(), 0)


class _Look(NamedTuple):
    """Folders that a host looks for."""

    host: str
    tenant: str
    versions: dict[str, int]
    """Version of the checkpoint at each path when the look began."""


@dataclass(eq=False)
class DiskTable(ControlPart):
    """Checkpoints on disk of tenants that have a bound.

    Args:
        sink: file of accounts, if there is one.
        number: number before that of the first look.
    """

    sink: AccountSink | None
    number: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tenants: dict[str, dict[str, _Folder]] = {}
        """Checkpoints of each tenant, by path."""
        self._versions = 0
        self._hosts: dict[str, None] = {}
        self.looks: dict[int, _Look] = {}
        """Looks that hosts have not answered, by number."""
        self._refused_s: dict[str, float] = {}
        """Time of the last refusal to each tenant, in seconds; only recent ones."""
        self._unwritten: dict[tuple[str, str], FolderEntry] = {}
        """Entries that the accounts do not have yet, by tenant and path."""
        self._ticker = Ticker(self._env, LOOK_S, self._look_at_all)
        self._soon = Ticker(self._env, SOON_S, self._look_at_refused)
        for entry in () if self.sink is None else self.sink.folders():
            size_bytes = entry.size_bytes
            folder = _Folder(entry.host, size_bytes, kept_bytes=size_bytes)
            self.tenants.setdefault(entry.tenant, {})[entry.path] = folder
            self._ticker.start()
        self.sessions.usage.disk_bytes = self.bytes_of

    def bytes_of(self, tenant: str) -> int:
        """Return the bytes on disk of a tenant; 0 if it has no bound, because then they are not counted."""
        if self._bound(tenant) is None:
            return 0
        return sum(folder.counted_bytes for folder in self.tenants.get(tenant, {}).values())

    def _bound(self, tenant: str) -> int | None:
        return self.sessions.usage.rights.of(tenant).bound(Resource.DISK)

    # --- saves ------------------------------------------------------------------------------------

    def take(self, tenant: str, save: msg.SaveArrays, size_bytes: int, host: str) -> None:
        """Count the bytes of a save that is about to begin, if its tenant has a bound.

        Args:
            tenant: of the client that saves.
            save: what the client asks for.
            size_bytes: bytes of all its arrays.
            host: name of a host that will write some of them.

        Raises:
            QuotaExceeded: the tenant would have more than it may; nothing is counted.
        """
        bound = self._bound(tenant)
        if bound is None:
            return
        folder = self.tenants.get(tenant, {}).get(save.path) or _Folder(host)
        more_bytes = size_bytes - folder.counted_bytes
        if more_bytes > 0 and self.bytes_of(tenant) + more_bytes > bound:
            self._refused_s[tenant] = self._env.now_s()
            self._soon.start(0.0)
            raise self._exceeded(tenant, save.path, size_bytes, bound)
        folder.saves[save.checkpoint], folder.host = size_bytes, host
        self.tenants.setdefault(tenant, {})[save.path] = folder
        self._note(tenant, save.path, folder)

    def settle(self, tenant: str, save: msg.SaveArrays, *, is_there: bool | None) -> None:
        """Count a checkpoint that is at its path now, or give back what its save took.

        Args:
            tenant: of the client that saved.
            save: what the client asked for.
            is_there: False if the checkpoint is not at its path; None if that is open, because its hosts
                were lost. Then its bytes count until a look.
        """
        if is_there:
            self._replace(tenant, save.path)
        folder = self.tenants.get(tenant, {}).get(save.path)
        if folder is None:
            return
        size_bytes = folder.saves.pop(save.checkpoint, folder.size_bytes if is_there else 0)
        if is_there is not False:
            self._versions += 1
            folder.version = self._versions
            folder.size_bytes = size_bytes if is_there else max(size_bytes, folder.size_bytes)
        self._note(tenant, save.path, folder)

    def _replace(self, tenant: str, path: str) -> None:
        """Count what other tenants had at a path no more."""
        for other, folders in list(self.tenants.items()):
            if other != tenant and path in folders:
                folders[path].size_bytes = 0
                self._note(other, path, folders[path])

    def _exceeded(self, tenant: str, path: str, size_bytes: int, bound: int) -> QuotaExceeded:
        has = in_words(Resource.DISK, self.bytes_of(tenant))
        words = (
            f"tenant {tenant!r} has {has} and may have {in_words(Resource.DISK, bound)}; the checkpoint {path} "
            f"takes {size_in_words(size_bytes)}. "
        )
        raise_it = "have the operator raise disk in pw-controller --tenants"
        folders = self.tenants.get(tenant, {})
        sizes = {other: one.counted_bytes for other, one in folders.items() if other != path}
        if size_bytes > bound or not sizes:
            return QuotaExceeded(f"{words}Save less, or {raise_it}")
        largest = max(sizes, key=sizes.__getitem__)
        return QuotaExceeded(
            f"{words}Delete checkpoints of this tenant (the largest: {largest}, "
            f"{size_in_words(sizes[largest])}), or {raise_it}. The cluster notices within a few seconds what "
            "was deleted; then save again"
        )

    # --- accounts ---------------------------------------------------------------------------------

    def _note(self, tenant: str, path: str, folder: _Folder) -> None:
        """Write the bytes of a path if they have changed, and forget a path that has none."""
        size_bytes = folder.counted_bytes
        if self.sink is not None and size_bytes != folder.kept_bytes:
            folder.kept_bytes = size_bytes
            entry = FolderEntry(path=path, tenant=tenant, size_bytes=size_bytes, host=folder.host)
            self._unwritten[tenant, path] = entry
            self._write()
        if not size_bytes and not folder.saves:
            del self.tenants[tenant][path]
            if not self.tenants[tenant]:
                del self.tenants[tenant]
        self._ticker.start()

    def _write(self) -> None:
        entries = list(self._unwritten.values())
        if self.sink is not None and entries and self.sink.write_folders(entries):
            self._unwritten.clear()

    # --- folders that users delete ----------------------------------------------------------------

    @handles(msg.Directory)
    def _hosts_are(self, sender: Address, directory: msg.Directory) -> None:
        self._hosts = dict.fromkeys(peer.node for peer in directory.peers)

    def host_lost(self, node: str) -> None:
        """Do not wait for the answers of a host."""
        self.looks = {number: one for number, one in self.looks.items() if one.host != node}

    def _look_at_all(self) -> bool:
        self._write()
        self._look(self.tenants)
        return bool(self.tenants or self._unwritten)

    def _look_at_refused(self) -> bool:
        since_s = self._env.now_s() - LOOK_S
        self._refused_s = {one: at_s for one, at_s in self._refused_s.items() if at_s > since_s}
        self._look(self._refused_s)
        return bool(self._refused_s)

    def _look(self, tenants: Iterable[str]) -> None:
        """Have hosts look for the folders of tenants that have a bound."""
        busy = {(look.tenant, look.host) for look in self.looks.values()}
        for tenant in tenants:
            versions: dict[str, dict[str, int]] = {}
            folders = {} if self._bound(tenant) is None else self.tenants.get(tenant, {})
            for path, folder in folders.items():
                host = folder.host if folder.host in self._hosts else next(iter(self._hosts), "")
                is_quiet = folder.size_bytes and not folder.saves
                if is_quiet and host and (tenant, host) not in busy:
                    versions.setdefault(host, {})[path] = folder.version
            for host, theirs in versions.items():
                paths = list(theirs)
                for at in range(0, len(paths), PATHS_AT_ONCE):
                    some = tuple(paths[at : at + PATHS_AT_ONCE])
                    self.number += 1
                    look = _Look(host, tenant, {path: theirs[path] for path in some})
                    self.looks[self.number] = look
                    self._env.send(store_of(host), msg.LookForFolders(self.number, some))

    @handles_host(msg.FoldersGone)
    def _gone(self, host: str, message: msg.FoldersGone) -> None:
        """Count folders no more that a host does not see, unless they were written again meanwhile."""
        look = self.looks.get(message.look)
        if look is None or look.host != host:
            self._env.count("messages_stale")
            return
        del self.looks[message.look]
        sees_some = set(message.paths) != look.versions.keys()
        for path in message.paths:
            folder = self.tenants.get(look.tenant, {}).get(path)
            if folder is None or folder.saves or folder.version != look.versions.get(path):
                continue
            if folder.host == host or sees_some:  # else its file system may be another one
                folder.size_bytes = 0
                self._note(look.tenant, path, folder)
