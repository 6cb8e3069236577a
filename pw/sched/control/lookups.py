"""Lookups: which version of a name a client gets, and when.

A lookup is handled in the order of its client, and waits: for the client's own publications, for the recovery
of the holder, and up to `wait_s` for a version that is not there yet. It reads one version, whole
(`pw.sched.control.names`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from pw.core import messages as msg
from pw.core.actors.actor import Timer, handles
from pw.core.errors import ArgumentError, NameNotFound
from pw.core.ids import Address
from pw.sched.control.clients import Client
from pw.sched.control.names import NameTable
from pw.sched.control.programs import said_of
from pw.sched.control.sessions import ControlPart, handles_client
from pw.sched.control.versions import SharedName, Version, VersionState

WAITING = 1024
"""Number of lookups of one client that wait, at most."""

UNTAKEN = 4096
"""Number of offers to one reader that it has not taken, at most; each is of the arrays on one slice."""


class LookupOver(NamedTuple):
    """Timer: a lookup has waited long enough."""

    client: int
    request: int


@dataclass(slots=True, eq=False)
class _WaitingLookup:
    """A lookup that waits."""

    client: Client
    message: msg.Lookup
    since_s: float
    """Time at which it began to wait, in seconds."""
    is_over: bool = False
    """True if it does not wait any more for a version that is not there."""
    timer: Timer | None = None
    """Timer after which it is over."""

    def cancel(self) -> None:
        """Cancel the timer: the lookup waits no more."""
        if self.timer is not None:
            self.timer.cancel()


@dataclass(eq=False)
class Lookups(ControlPart):
    """Lookups of all clients."""

    names: NameTable
    waiting: dict[int, dict[int, _WaitingLookup]] = field(default_factory=dict, init=False)
    """Lookups that wait, by client and request."""
    _untaken: defaultdict[int, dict[bytes, None]] = field(
        default_factory=lambda: defaultdict(dict), init=False
    )
    """Tokens of offers that each reader had not taken when it was last looked at."""
    _has_news: bool = field(default=False, init=False)
    """True if one of them may be answered."""
    _is_blocked: bool = field(default=False, init=False)
    """True if one of them waits for the recovery of a holder."""

    def look_up(self, client: Client, message: msg.Lookup) -> None:
        """A client looks a name up."""
        waiting = self.waiting.get(client.number, {})
        if message.request in waiting:
            self._env.count("messages_duplicate")
            return
        reader = _WaitingLookup(client, message, self._env.now_s(), message.wait_s <= 0)
        if self._answer(reader):
            return
        if len(waiting) >= WAITING:
            words = f"a client has more than {WAITING} lookups that wait"
            self.names.refuse(client, message.request, ArgumentError(words))
            return
        self.waiting.setdefault(client.number, waiting)[message.request] = reader
        if not reader.is_over and message.wait_s < math.inf:
            over = LookupOver(client.number, message.request)
            reader.timer = self._env.call_later(message.wait_s, over)

    @handles(LookupOver)
    def _lookup_over(self, sender: Address, timer: LookupOver) -> None:
        reader = self.waiting.get(timer.client, {}).get(timer.request)
        if reader is not None:
            reader.is_over = True
            self._has_news = True

    def go_on(self) -> bool:
        """Answer lookups that wait; return whether other parts have to go on."""
        went_on = False
        if self._has_news or self.names.has_news:
            self._has_news = self.names.has_news = False
            for reader in [one for waiting in self.waiting.values() for one in waiting.values()]:
                if self._answer(reader):
                    went_on = True
                    self._forget(reader)
        if not went_on:  # the next call is in another turn
            self._has_news, self._is_blocked = self._is_blocked, False
        return went_on

    def client_left(self, client: Client) -> None:
        """Forget the lookups of a client."""
        self._untaken.pop(client.number, None)
        for reader in self.waiting.pop(client.number, {}).values():
            reader.cancel()

    def _forget(self, reader: _WaitingLookup) -> None:
        reader.cancel()
        waiting = self.waiting[reader.client.number]
        del waiting[reader.message.request]
        if not waiting:
            del self.waiting[reader.client.number]

    def _answer(self, reader: _WaitingLookup) -> bool:
        """Answer a lookup; return False if it still has to wait."""
        client, message = reader.client, reader.message
        shared = self.names.directory.find(client, message.name, message.version)
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
            what = f"version {shared.newest} of {message.name!r} is lost; publish it again"
            self.sessions.tell(client, msg.RequestFailed(message.request, said_of(what, lost)))
            return True
        if shared is None or version is None or version.number <= message.after:
            if reader.is_over:
                error = self.names.directory.not_there(
                    client, message.name, message.version, message.after, message.wait_s
                )
                self.names.refuse(client, message.request, error)
            return reader.is_over
        holder = shared.holder
        if holder.recovering or any(
            part.slice not in self._islands.bindings for part in version.parts
        ):
            self._is_blocked = True
            return False
        if not self._has_room(client):
            words = (
                f"this session has {UNTAKEN} offers of arrays that it has looked up and not taken; take them, "
                "or wait until they end"
            )
            self.names.refuse(client, message.request, ArgumentError(words))
            return True
        parts = self._offer(shared, version, client)
        offer = msg.VersionOffer(
            message.request, shared.name, version.number, parts, version.publication.tree
        )
        self.sessions.tell(client, offer)
        return True

    def _has_room(self, client: Client) -> bool:
        """Whether a version may be offered to a reader, which takes what it is offered."""
        untaken = self._untaken[client.number]
        if len(untaken) >= UNTAKEN:
            for token in list(untaken):
                if not self.names.handovers.is_untaken(token):
                    del untaken[token]
        return len(untaken) < UNTAKEN

    def _offer(
        self, shared: SharedName, version: Version, client: Client
    ) -> tuple[msg.SharedPart, ...]:
        """Offer the arrays of a version to a reader, which is counted from now on."""
        shares = []
        for part in version.parts:
            run = self.names.new_id(shared)
            token = self.sessions.claims.permit(run, shared.holder.name, str(client.number))
            entries = [shared.holder.arrays.get(array) for array in part.arrays]
            specs = tuple([entry.spec for entry in entries if entry is not None])
            version.readers[token] = client.number
            self._untaken[client.number][token] = None
            self.names.offered[token] = shared, version
            self.names.handovers.offer(shared.holder, msg.Offer(run, token, part.arrays, specs))
            devices = shared.holder.slices.devices(part.slice)
            assert devices is not None, "the slice is bound"
            shares.append(msg.SharedPart(token, part.slice, devices))
        return tuple(shares)

    @handles_client(msg.GetNames)
    def _list(self, client: Client, message: msg.GetNames) -> None:
        infos = []
        for shared in self.names.directory.seen_by(client):
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
