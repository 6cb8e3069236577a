"""The versions of a name, and their states.

Theory of operation. A *version* is a set of arrays that a holder owns: a client without a process
(`Sessions.hold`). It begins *arriving*: its publisher hands the arrays over. When all have their values it is
*current*, in one turn of the controller, and the version before it is *replaced*. So there is never a version
of which a reader could get a part. A version that is not current any more stays as long as readers have arrays
of it, then it is *gone*. One whose arrays have failed before all were there is gone at once, and nothing else
changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from pw.core.actors.lifecycle import Lifecycle
from pw.core.errors import ErrorReport
from pw.core.messages import EVERY_TENANT, Offer, Publish
from pw.core.tenants import OPERATOR
from pw.sched.control.array_states import ArrayEntry
from pw.sched.control.clients import Client


class VersionState(StrEnum):
    """The states of a version."""

    ARRIVING = "arriving"
    """State of a version of which some arrays are not there."""
    CURRENT = "current"
    """State of the version that lookups find."""
    REPLACED = "replaced"
    """State of a version that only its readers have."""
    GONE = "gone"
    """State of a version whose arrays are deleted."""


class VersionEvent(StrEnum):
    """Event that changes the state of a version."""

    COMPLETE = "all arrays are there"
    FAIL = "an array fails"
    RETIRE = "a newer version is complete, or the name ends"
    RELEASE = "the last reader leaves"


_S, _E = VersionState, VersionEvent

VERSION = Lifecycle[VersionState, VersionEvent](
    "version",
    {
        _S.ARRIVING: {_E.COMPLETE: _S.CURRENT, _E.FAIL: _S.GONE},
        _S.CURRENT: {_E.RETIRE: _S.REPLACED},
        _S.REPLACED: {_E.RELEASE: _S.GONE},
        _S.GONE: {},
    },
)


@dataclass(slots=True, eq=False)
class VersionPart:
    """The arrays of a version on one slice."""

    offer: Offer
    """Offer of the publisher, which the holder takes."""
    slice: int
    """Number of the holder's slice on the same devices."""
    arrays: tuple[int, ...] = ()
    """Numbers of the holder's arrays; none before the slice is bound."""


@dataclass(slots=True, eq=False)
class Version:
    """One version of a name."""

    number: int
    maker: int
    """Number of the client that published it; 0 when it has left."""
    publication: Publish
    parts: list[VersionPart]
    state: VersionState = VersionState.ARRIVING
    arriving: list[int] = field(default_factory=list)
    """Numbers of arrays that were not there at the last look."""
    waits_for: ArrayEntry | None = None
    """Array of the holder that was still arriving at the last look, if all parts are taken."""
    is_asked: bool = False
    """True if the hosts were asked whether all values are there."""
    is_whole: bool = False
    """True if they have said so."""
    error: ErrorReport | None = None
    """Error of an array that has no value."""
    readers: dict[bytes, int] = field(default_factory=dict)
    """Numbers of the clients that take or have its arrays, by the tokens of their offers."""

    @property
    def stands_still(self) -> bool:
        """Whether the last look at the version saw the same."""
        array = self.waits_for
        return array is not None and bool(array.awaited) and array.error is None

    def happened(self, event: VersionEvent) -> None:
        """Change the state."""
        self.state = VERSION.after(self.state, event)

    @property
    def origin(self) -> tuple[int, int]:
        """Number of the maker, and of its request."""
        return self.maker, self.publication.request

    @property
    def arrays(self) -> Iterator[int]:
        """Numbers of the holder's arrays."""
        return (array for part in self.parts for array in part.arrays)

    @property
    def size_bytes(self) -> int:
        """Bytes of one copy of all arrays."""
        return sum(spec.size_bytes for part in self.parts for spec in part.offer.specs)


@dataclass(slots=True, eq=False)
class SharedName:
    """A name, its holder and its versions."""

    tenant: str
    name: str
    holder: Client
    versions: dict[int, Version] = field(default_factory=dict)
    """Versions that are not gone, by number; the newest one last."""
    current: Version | None = None
    last: int = 0
    """Number of the newest version that was ever begun."""
    newest: int = 0
    """Highest number of a version that was current, or that has ended with the name: lower ones are not any
    more."""
    likes: dict[int, int] = field(default_factory=dict)
    """The holder's slices, by those of publishers."""
    serial: int = 0
    """Number of ids that `new_id` has returned."""

    def may_read(self, client: Client, version: Version | None) -> bool:
        """Whether a client may read a version, or look the name up if there is no such version."""
        if client.tenant in (self.tenant, OPERATOR):
            return True
        to = () if version is None else version.publication.to
        return EVERY_TENANT in to or client.tenant in to

    def chosen(self, number: int) -> Version | None:
        """Return the version with a number, also one that arrives; without it the current one."""
        return self.versions.get(number, self.current)

    def error(self) -> ErrorReport | None:
        """Return why the current version has no values any more, if it has not."""
        arrays = () if self.current is None else self.current.arrays
        entries = map(self.holder.arrays.get, arrays)
        return next((one.error for one in entries if one is not None and one.error), None)
