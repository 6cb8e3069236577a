"""Names: an array's owner is a client, or a name.

Theory of operation. A name has a *holder*, which is a client without a process: it owns arrays, lineage and
slices like every other one. To publish is to hand arrays over to the holder, to look up is to hand them over to
a reader (`pw.sched.control.handovers`). So both are views: they share the memory, either side deletes and
donates its own arrays, and recovery has the exporter make again what the importer has lost. The holder's slices
are like those of the publisher, and outlast them.

`versions` says how a version begins and ends. The current version of a name changes in one turn. A lookup
reads one version, whole. A reader of a version is counted by the offers that the holder makes for it: an offer
ends when its reader's lineage needs none of its arrays any more.

The controller tells the maker of a version when it ends, and the maker tells no later controller of it.

When the maker of the current version leaves, the version is retired, at once or `keep_s` later. In between its
arrays are checkpointed, because nothing else could make them again. What a reader has, it keeps.

`pw.sched.control.directory` has the names and says which of them a client may read, `pw.sched.control.lookups`
which version a lookup gets, and when.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from pw.core import messages as msg
from pw.core.actors.actor import handles
from pw.core.errors import (
    INFRASTRUCTURE,
    AccessRefused,
    ArgumentError,
    ArrayDeleted,
    ArrayLost,
    Error,
    ErrorReport,
    QuotaExceeded,
)
from pw.core.ids import Address, client_id, client_of
from pw.core.messages import EVERY_TENANT
from pw.core.rights import Resource
from pw.core.sharding import Placement
from pw.core.tenants import OPERATOR
from pw.sched.control.checkpoints.replicas import ReplicaTable
from pw.sched.control.clients import Client
from pw.sched.control.confirmations import Confirmations
from pw.sched.control.directory import NameDirectory
from pw.sched.control.handovers import HandoverTable
from pw.sched.control.sessions import ControlPart
from pw.sched.control.set_aside import Ordered
from pw.sched.control.slices import SliceRequests
from pw.sched.control.uploads import UploadTable
from pw.sched.control.versions import SharedName, Version, VersionEvent, VersionPart, VersionState

NAMES = 1024
"""Number of names of one tenant, at most."""
VERSIONS = 1024
"""Number of versions of one name, at most: those that arrive, the current one, and those that readers have."""
AGAIN_S = 0.1
"""Seconds before hosts are asked again for arrays of which some were lost."""


class KeepOver(NamedTuple):
    """Timer: a version has outlasted its maker's session long enough."""

    tenant: str
    name: str
    version: int


class ConfirmAgain(NamedTuple):
    """Timer: hosts may have the values of a version now."""

    version: Version


@dataclass(eq=False)
class NameTable(ControlPart):
    """Names of all tenants."""

    slices: SliceRequests
    replicas: ReplicaTable
    handovers: HandoverTable
    uploads: UploadTable
    confirmations: Confirmations
    remove: Callable[[Client, str], None]
    """Releases all that a holder owns."""
    directory: NameDirectory = field(default_factory=NameDirectory, init=False)
    _arriving: deque[tuple[SharedName, Version]] = field(default_factory=deque, init=False)
    offered: dict[bytes, tuple[SharedName, Version]] = field(default_factory=dict, init=False)
    """Versions that offers to readers are of, by token."""
    has_news: bool = field(default=False, init=False)
    """True if lookups that wait may be answered; the part that looks at them clears it."""

    # --- published ------------------------------------------------------------------------------------

    def publish(self, client: Client, message: msg.Publish) -> None:
        """A client publishes a version of a name of its tenant."""
        runs = [offer.run for offer in message.offers]
        strange = any(client_of(run) != client.number or client.has_come(run) for run in runs)
        if strange or self._has_come(client, message):
            self._env.count("messages_duplicate")
            return
        error = self._objection(client, message)
        if error is not None:
            for run in runs:
                client.is_new(run)
                client.lineage.refuse_run(run)
            self.refuse(client, message.request, error)
            return
        for offer in message.offers:
            self.handovers.offer(client, offer)
        self._begin(client, message, resumed=False)

    def published_before(self, client: Client, message: msg.Publish) -> None:
        """A client of an earlier controller had published a version."""
        if self._has_come(client, message):
            self._env.count("messages_duplicate")
            return
        if (error := self._objection(client, message)) is not None:
            for offer in message.offers:
                client.lineage.refuse_run(offer.run)
            self.refuse(client, message.request, error)
            return
        for offer in message.offers:
            self.handovers.offered_before(client, offer)
        self._begin(client, message, resumed=True)

    def _has_come(self, client: Client, message: msg.Publish) -> bool:
        """Whether there is a version of this publication."""
        shared = self.directory.get(client.tenant, message.name)
        versions = () if shared is None else shared.versions.values()
        return any((client.number, message.request) == one.origin for one in versions)

    def _objection(self, client: Client, message: msg.Publish) -> Error | None:
        shared = self.directory.get(client.tenant, message.name)
        if not message.name or "/" in message.name:
            return ArgumentError(
                f"{message.name!r} is no name for arrays: it has at least one character, and no slash"
            )
        if shared is None and self.directory.count_of(client.tenant) >= NAMES:
            return ArgumentError(
                f"tenant {client.tenant!r} has {NAMES} names, as many as it may have; pw.unpublish "
                "those that nothing needs"
            )
        if shared is not None and len(shared.versions) >= VERSIONS:
            return ArgumentError(
                f"{message.name!r} has {VERSIONS} versions that arrive or that readers have, as many as it may "
                "have; wait for earlier ones, with pw.publish(...).result(), or have readers delete theirs"
            )
        rights = self.sessions.usage.rights.of(client.tenant)
        if EVERY_TENANT in message.to and not rights.may_publish_to_all:
            return AccessRefused(
                f"tenant {client.tenant!r} may not publish {message.name!r} to all (may_publish_to_all in "
                "pw-controller --tenants); name the tenants that are to read it, as in to=['research']"
            )
        if client.resuming is None:  # else it keeps what it had
            try:
                more = int(shared is None)
                self.sessions.usage.check(client.tenant, Resource.NAMES, more)
            except QuotaExceeded as error:
                return error
        for offer in message.offers:
            entries = map(client.arrays.get, offer.arrays)
            failed = next((one.error for one in entries if one is not None and one.error), None)
            if failed is not None:
                # As of an island that was given up, where a version would wait for ever.
                return failed.exception()
            if not offer.specs or client.slices.devices(offer.specs[0].placement.slice) is None:
                return ArrayDeleted(
                    f"an array of {message.name!r} lies on devices that were given back; put it on others "
                    "first, with pw.put"
                )
        return None

    def _begin(self, client: Client, message: msg.Publish, *, resumed: bool) -> None:
        shared = self.directory.get(client.tenant, message.name)
        if shared is None:
            words = f"name {message.name!r}"
            holder = self.sessions.hold(words, client.tenant, self.replicas.unclaimed)
            shared = SharedName(client.tenant, message.name, holder)
            self.directory.add(shared)
        former = message.version if resumed else 0
        number = former if former > shared.last else shared.last + 1
        shared.last = number
        parts = [
            VersionPart(offer, self._slice(client, shared, offer, resumed=resumed))
            for offer in message.offers
        ]
        version = Version(number, client.number, message, parts)
        shared.versions[number] = version
        self._arriving.append((shared, version))

    def _slice(self, client: Client, shared: SharedName, offer: msg.Offer, *, resumed: bool) -> int:
        """Return the holder's slice on the devices of an offer."""
        model = offer.specs[0].placement.slice
        own = shared.likes.get(model)
        if own is None or own not in shared.holder.slices.owned:
            devices = client.slices.devices(model)
            assert devices is not None, "the publication was checked"
            own = self.slices.allocate_like(shared.holder, model, devices, resumed=resumed)
            shared.likes[model] = own
        return own

    def take(self, shared: SharedName, part: VersionPart) -> None:
        """Have the holder take the arrays of an offer."""
        arrays = []
        for index, spec in enumerate(part.offer.specs):
            number = self.new_id(shared)
            placement = Placement(part.slice, spec.placement.devices)
            own = msgspec.structs.replace(spec, placement=placement)
            source = msg.OfferSource(part.offer.token, index)
            self.uploads.create(shared.holder, msg.CreateArray(number, own, source=source))
            arrays.append(number)
        part.arrays = tuple(arrays)

    def new_id(self, shared: SharedName) -> int:
        shared.serial += 1
        return client_id(shared.holder.number, shared.serial)

    # --- what goes on at the end of a turn ------------------------------------------------------------

    def go_on(self) -> bool:
        """Take, complete and end versions; return whether other parts have to go on."""
        went_on = False
        for _ in range(len(self._arriving)):  # one by one: the rest stays if one raises
            shared, version = self._arriving.popleft()
            if version.stands_still:
                self._arriving.append((shared, version))
            else:
                went_on |= self.arrive(shared, version)
        if self.handovers.ended:
            ended, self.handovers.ended = self.handovers.ended, []
            for token in ended:
                entry = self.offered.pop(token, None)
                if entry is not None:
                    entry[1].readers.pop(token, None)
                    went_on |= self.release(*entry)
        return went_on

    def arrive(self, shared: SharedName, version: Version) -> bool:
        """Look at a version that arrives; return whether other parts have to go on."""
        holder, took = shared.holder, False
        for part in version.parts:
            if part.slice not in holder.slices.owned:
                self._fail(shared, version, _gone(shared))
                return True
            if not part.arrays and part.slice in self._islands.bindings:
                self.take(shared, part)
                version.arriving += part.arrays
                took = True
        version.waits_for = None
        while version.arriving:
            array = holder.arrays.get(version.arriving[-1])
            if array is None or array.error is not None:
                error = None if array is None else array.error
                self._fail(shared, version, error or _gone(shared))
                return True
            if array.is_lost or array.awaited:
                if all(part.arrays for part in version.parts):
                    version.waits_for = array
                break
            version.arriving.pop()
        if version.error is not None:
            self._fail(shared, version, version.error)
            return True
        is_here = not version.arriving and all(part.arrays for part in version.parts)
        if is_here and not version.is_asked and not holder.recovering:
            version.is_asked = True
            arrays = [(number, holder.arrays.held[number]) for number in version.arrays]
            self.confirmations.ask(arrays, partial(self._confirmed, version))
        if is_here and version.is_whole and not holder.recovering:
            self.complete(shared, version)
            return True
        self._arriving.append((shared, version))
        return took

    def _confirmed(self, version: Version, error: ErrorReport | None) -> None:
        """Hosts have said whether all arrays of a version have their values."""
        if error is None:
            version.is_whole = True
        elif error.kind not in INFRASTRUCTURE:
            version.error = error
        else:  # recovery brings what is lost
            version.arriving = list(version.arrays)
            self._env.call_later(AGAIN_S, ConfirmAgain(version))

    @handles(ConfirmAgain)
    def _ask_again(self, sender: Address, timer: ConfirmAgain) -> None:
        timer.version.is_asked = False

    def complete(self, shared: SharedName, version: Version) -> None:
        """All arrays of a version are there: from now on every lookup finds it, and none an older one."""
        version.happened(VersionEvent.COMPLETE)
        self.has_news = True
        self._tell(version.maker, msg.Published(version.publication.request, version.number))
        if version.number <= shared.newest:  # a later one was faster, or has ended the name
            self._retire(shared, version)
            return
        former, shared.current, shared.newest = shared.current, version, version.number
        if former is not None:
            self._retire(shared, former)
        if not version.maker:
            self._keep(shared, version)

    def _fail(self, shared: SharedName, version: Version, error: ErrorReport) -> None:
        version.happened(VersionEvent.FAIL)
        refused = msg.RequestFailed(version.publication.request, error)
        self._tell(version.maker, refused)
        self._drop(shared, version)
        self.has_news = True

    def _tell(self, number: int, message: object) -> None:
        client = self.sessions.get(number)
        if client is not None:
            self.sessions.tell(client, message)

    # --- ends -----------------------------------------------------------------------------------------

    def tell_of_end(self, version: Version) -> None:
        """Have its maker not tell another controller of a version."""
        self._tell(version.maker, msg.VersionEnded(version.publication.request))

    def _retire(self, shared: SharedName, version: Version) -> None:
        version.happened(VersionEvent.RETIRE)
        self.tell_of_end(version)
        if shared.current is version:
            shared.current = None
        self.release(shared, version)

    def release(self, shared: SharedName, version: Version) -> bool:
        """Delete a version that is not current, if it has no reader."""
        if version.state is not VersionState.REPLACED or version.readers:
            return False
        version.happened(VersionEvent.RELEASE)
        self._drop(shared, version)
        return True

    def _drop(self, shared: SharedName, version: Version) -> None:
        """Forget a version that is gone, its arrays and slices; with the last one its name."""
        holder = shared.holder
        del shared.versions[version.number]
        for part in version.parts:
            if not part.arrays:
                self.handovers.withdraw(part.offer.token)
        if shared.versions:
            used = {part.slice for one in shared.versions.values() for part in one.parts}
            unused = {model: own for model, own in shared.likes.items() if own not in used}
            for model in unused:
                del shared.likes[model]
            releases = map(msg.ReleaseSlice, unused.values())
            self._in_order(holder, msg.Delete(tuple(version.arrays)), *releases)
        else:
            self.directory.remove(shared)
            self.remove(holder, "nothing is published under its name")

    def client_left(self, client: Client) -> None:
        """Keep or end what a client has published, and do not count it as a reader."""
        for token, (_, version) in list(self.offered.items()):
            if version.readers.get(token) == client.number:
                self.handovers.withdraw(token)
        for shared in self.directory.all():
            for version in list(shared.versions.values()):
                if version.maker != client.number:
                    continue
                version.maker = 0
                if version is shared.current:
                    self._keep(shared, version)

    def _keep(self, shared: SharedName, version: Version) -> None:
        """The maker of the current version has left."""
        keep_s = version.publication.keep_s
        if not keep_s:
            self._retire(shared, version)
            return
        if keep_s < math.inf:
            over = KeepOver(shared.tenant, shared.name, version.number)
            self._env.call_later(keep_s, over)
        if arrays := tuple(version.arrays):
            self._in_order(shared.holder, msg.Checkpoint(0, arrays))

    def _in_order(self, holder: Client, *messages: Ordered) -> None:
        """Have a holder do something after its earlier work, and in order with its recovery."""
        holder.stream.backlog.extend(messages)
        self.sessions.wake(holder.number)

    @handles(msg.SliceBound)
    def slice_bound(self, sender: Address, message: msg.SliceBound) -> None:
        """A holder may have borrowed a slice for its recovery, which it gives back."""
        holder = self.sessions.owner(message.slice)
        if holder is not None and holder.is_holder:
            self.sessions.wake(holder.number)

    @handles(KeepOver)
    def _keep_over(self, sender: Address, timer: KeepOver) -> None:
        shared = self.directory.get(timer.tenant, timer.name)
        version = None if shared is None else shared.current
        if shared is None or version is None or version.maker:
            return
        if version.number == timer.version:
            self._retire(shared, version)

    def unpublish(self, client: Client, message: msg.Unpublish) -> None:
        """A client ends a name."""
        shared = self.directory.find(client, message.name)
        if shared is None or (shared.current is None and shared.newest == shared.last):
            self.refuse(client, message.request, self.directory.not_there(client, message.name))
        elif client.tenant not in (shared.tenant, OPERATOR):
            error = self.sessions.objection(
                client, f"unpublish {message.name!r}", f"clients of {shared.tenant!r}"
            )
            self.sessions.tell(client, msg.RequestFailed(message.request, error))
        else:
            shared.newest = shared.last  # also of versions that are still arriving
            for version in shared.versions.values():
                if version.state is VersionState.ARRIVING:
                    self.tell_of_end(version)
            if shared.current is not None:
                self._retire(shared, shared.current)
            self.sessions.tell(client, msg.Answered(message.request, None))

    def refuse(self, client: Client, request: int, error: Error) -> None:
        """Fail a request."""
        self.sessions.tell(client, msg.RequestFailed(request, ErrorReport.of(error)))


def _gone(shared: SharedName) -> ErrorReport:
    return ErrorReport.of(ArrayLost(f"{shared.name!r} was lost while it was published"))
