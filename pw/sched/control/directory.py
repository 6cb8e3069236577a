"""The directory of names: which names there are, and which of them a client may read.

`pw.sched.control.names` adds names with their first version and removes them with their last one.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field

from pw.core.errors import NameNotFound
from pw.sched.control.clients import Client
from pw.sched.control.versions import SharedName

RECENT = 1 << 14
"""Number of names of one tenant that have ended whose version numbers go on, when they are published again."""


@dataclass(eq=False)
class NameDirectory:
    """Names of all tenants."""

    _names: dict[tuple[str, str], SharedName] = field(default_factory=dict, init=False)
    """Names by their tenants and texts."""
    _recent: defaultdict[str, OrderedDict[str, int]] = field(
        default_factory=lambda: defaultdict(OrderedDict), init=False
    )
    """Newest version numbers of each tenant's names that have ended, the one that ended longest ago first."""

    def get(self, tenant: str, name: str) -> SharedName | None:
        """Return a name of a tenant; None if nothing is published under it."""
        return self._names.get((tenant, name))

    def all(self) -> list[SharedName]:
        """Return the names of all tenants."""
        return list(self._names.values())

    def count_of(self, tenant: str) -> int:
        """Return how many names a tenant has."""
        return sum(one == tenant for one, _ in self._names)

    def add(self, shared: SharedName) -> None:
        """Add a name; the numbers of its versions go on where those of an earlier one have ended."""
        self._names[shared.tenant, shared.name] = shared
        shared.last = shared.newest = self._recent[shared.tenant].pop(shared.name, 0)

    def remove(self, shared: SharedName) -> None:
        """Remove a name that has no version any more."""
        del self._names[shared.tenant, shared.name]
        recent = self._recent[shared.tenant]
        recent[shared.name] = shared.last
        if len(recent) > RECENT:
            recent.popitem(last=False)

    # --- read -----------------------------------------------------------------------------------------

    def find(self, client: Client, name: str, version: int = 0) -> SharedName | None:
        """Return a name of which a client may read a version, by the text that the client has for it.

        Args:
            client: the reader.
            name: the name; of another tenant's, after the tenant and a slash.
            version: number of the version; 0 for the current one, whose readers may also wait for versions that
                are not there.
        """
        tenant, slash, own = name.partition("/")
        key = (tenant, own) if slash else (client.tenant, name)
        shared = self._names.get(key)
        if shared is None or not shared.may_read(client, shared.chosen(version)):
            return None
        return shared

    def not_there(
        self, client: Client, name: str, version: int = 0, after: int = 0, wait_s: float = 0.0
    ) -> NameNotFound:
        """Return the error of a lookup that finds nothing, though it has waited so long."""
        shared = self.find(client, name, version)
        if shared is not None and shared.current is not None and (version or after):
            what = f"version {version}" if version else f"version after {after}"
            then = f"after {wait_s:g} s" if wait_s else "yet. Give wait= to wait for it"
            return NameNotFound(
                f"the newest version of {name!r} is {shared.current.number}; it has no {what} {then}"
            )
        names = [self._text_for(client, one) for one in self.seen_by(client)]
        listed = f"; there are: {', '.join(names[:8])}" if names else ""
        then = f" after {wait_s:g} s" if wait_s else ""
        return NameNotFound(f"nothing is published as {name!r} for this session{then}{listed}")

    def seen_by(self, client: Client) -> list[SharedName]:
        """Return the names that a client may look up."""
        shown = (one for one in self._names.values() if one.current is not None)
        return [one for one in shown if one.may_read(client, one.current)]

    def _text_for(self, client: Client, shared: SharedName) -> str:
        is_own = shared.tenant == client.tenant
        return shared.name if is_own else f"{shared.tenant}/{shared.name}"
