"""Lookups: which version of a name a client gets, and when.

A lookup is handled in the order of its client, and waits: for the client's own publications, for the recovery
of the holder, and up to `wait_s` for a version that is not there yet. It reads one version, whole
(`pw.sched.control.names`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from pw.core import messages as msg
from pw.core.actors.actor import handles
from pw.core.errors import ArgumentError, NameNotFound
from pw.core.ids import Address
from pw.sched.control.clients import Client
from pw.sched.control.names import NameTable
from pw.sched.control.sessions import ControlPart, handles_client
from pw.sched.control.versions import VersionState

WAITING = 1024
"""Number of lookups of one client that wait, at most."""


class LookupOver(NamedTuple):
    """Timer: a lookup has waited long enough."""

    client: int
    request: int


@dataclass(slots=True, eq=False)
class _WaitingLookup:
    """A lookup that waits."""

    client: Client
    message: msg.Lookup
    is_over: bool = False
    """True if it does not wait any more for a version that is not there."""


@dataclass(eq=False)
class Lookups(ControlPart):
    """Lookups of all clients."""

    names: NameTable
    _waiting: dict[tuple[int, int], _WaitingLookup] = field(default_factory=dict, init=False)
    """Lookups that wait, by client and request."""
    _has_news: bool = field(default=False, init=False)
    """True if one of them may be answered."""
    _is_blocked: bool = field(default=False, init=False)
    """True if one of them waits for the recovery of a holder."""

    def look_up(self, client: Client, message: msg.Lookup) -> None:
        """A client looks a name up."""
        reader = _WaitingLookup(client, message, message.wait_s <= 0)
        if self._answer(reader):
            return
        if sum(number == client.number for number, _ in self._waiting) >= WAITING:
            words = f"a client has more than {WAITING} lookups that wait"
            self.names.refuse(client, message.request, ArgumentError(words))
            return
        self._waiting[client.number, message.request] = reader
        if not reader.is_over and message.wait_s < math.inf:
            self._env.call_later(message.wait_s, LookupOver(client.number, message.request))

    @handles(LookupOver)
    def _lookup_over(self, sender: Address, timer: LookupOver) -> None:
        reader = self._waiting.get((timer.client, timer.request))
        if reader is not None:
            reader.is_over = True
            self._has_news = True

    def go_on(self) -> bool:
        """Answer lookups that wait; return whether other parts have to go on."""
        went_on = False
        if self._has_news or self.names.has_news:
            self._has_news = self.names.has_news = False
            for reader in list(self._waiting.values()):
                if self._answer(reader):
                    went_on = True
                    del self._waiting[reader.client.number, reader.message.request]
        if not went_on:  # the next call is in another turn
            self._has_news, self._is_blocked = self._is_blocked, False
        return went_on

    def client_left(self, client: Client) -> None:
        """Forget the lookups of a client."""
        for key in [key for key in self._waiting if key[0] == client.number]:
            del self._waiting[key]

    def _answer(self, reader: _WaitingLookup) -> bool:
        """Answer a lookup; return False if it still has to wait."""
        client, message = reader.client, reader.message
        shared = self.names.find(client, message.name, message.version)
        if shared is not None and any(
            one.state is VersionState.ARRIVING and one.maker == client.number
            for one in shared.versions.values()
        ):
            return False
        version = None if shared is None else shared.current
        if shared is not None and message.version:
            version = shared.versions.get(message.version)
            if version is None and message.version <= shared.last:
                newest = (
                    "" if shared.current is None else f"; the newest is {shared.current.number}"
                )
                words = f"version {message.version} of {message.name!r} is gone{newest}"
                self.names.refuse(client, message.request, NameNotFound(words))
                return True
            if version is not None and version.state is VersionState.ARRIVING:
                version = None
        if shared is not None and version is shared.current and (lost := shared.error()):
            self.sessions.tell(client, msg.RequestFailed(message.request, lost))
            return True
        if shared is None or version is None or version.number <= message.after:
            if reader.is_over:
                error = self.names.not_there(client, message.name, message.version, message.after)
                self.names.refuse(client, message.request, error)
            return reader.is_over
        holder = shared.holder
        if holder.recovering or any(
            part.slice not in self._islands.bindings for part in version.parts
        ):
            self._is_blocked = True
            return False
        parts = self.names.offer(shared, version, client)
        offer = msg.VersionOffer(
            message.request, shared.name, version.number, parts, version.publication.tree
        )
        self.sessions.tell(client, offer)
        return True

    @handles_client(msg.GetNames)
    def _list(self, client: Client, message: msg.GetNames) -> None:
        infos = []
        for shared in self.names.seen_by(client):
            version = shared.current
            assert version is not None, "only such names are seen"
            readers = {n for one in shared.versions.values() for n in one.readers.values()}
            infos.append(
                msg.NameInfo(
                    shared.name,
                    shared.tenant,
                    version.number,
                    tuple(n for n, one in shared.versions.items() if shared.may_read(client, one)),
                    sum(len(part.arrays) for part in version.parts),
                    version.size_bytes,
                    len(readers),
                    version.maker,
                    version.publication.keep_s,
                    version.publication.to if client.may_touch(shared.holder) else (),
                )
            )
        self.sessions.tell(client, msg.NameList(message.request, tuple(infos)))
