"""The lines of a client: one more connection to each host, which belongs to the threads that call.

A line carries what a call under a lease needs: its launch, the question whether a result is ready or what a
small value is, and the answer. A thread sends and reads by itself; the session's thread need not wake.
All lines of a client are those of one node, beside that of its session.

    absent -`meet`: identify, and ask for nothing-> meeting
    meeting -the host answers-> open
    meeting, open -the line is lost-> absent: what was asked there is asked by the session

An answer here is good: the value, or that the array is ready. For all else the session asks once more
(`Requests`), which knows what an error means and where an array is by now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from pw.client.session.hosts import Hosts, cover
from pw.client.session.thread_messages import (
    Await,
    Get,
    LineLost,
    Meet,
    TellLaunched,
    reject,
    resolve,
)
from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.errors import Disconnected, Error
from pw.core.ids import Address, store_of
from pw.core.packing import unpack
from pw.core.sharding import ArraySpec, Box, box_bytes, packed_offsets

GANG = 64
"""The hosts of a larger slice get a line when a thread waits for what they have."""
MOST_LINES = 256
"""Hosts that have a line to one client at most; the session asks the others."""
SPECS = 4096
"""Specs of which the hosts with such an array are remembered."""


class Wires(Protocol):
    """The network of the lines' node."""

    name: str
    """The lines' node; empty if there can be no lines."""

    def introduce(self, node: str, endpoint: str) -> None:
        """Make a host reachable."""

    def tell(self, hosts: Sequence[Address], message: object) -> None:
        """Send a message to an actor on each of some hosts."""

    def forget(self, node: str) -> None:
        """Close the line to a host."""

    def within(self, act: Callable[[], object]) -> None:
        """Do something with the lines on the session's thread, while no other thread uses them.

        If it cannot be done, `Lines.forget_all` follows.
        """


class _LineQuery(msgspec.Struct, eq=False):
    """What a thread waits for, and which hosts have not answered."""

    note: Await | Get
    missing: set[str]
    boxes: Sequence[Box] = ()


class SmallValue(NamedTuple):
    """Where one host has a whole small value."""

    host: str
    positions: tuple[int, ...]
    """Mesh positions of the shards."""
    boxes: tuple[Box, ...]


@dataclass(eq=False, repr=False)
class Lines(Part):
    """The lines of one client.

    Every thread may call `ask`, `begin` and `wires.tell`, one at a time. All else belongs to the session's
    thread. What hosts send (`received`, `lost`) may come on any thread.

    Args:
        env: the session's.
        hosts: places of hosts and arrays.
        ask_session: takes a note for the session, from any thread.
        has_failed: returns whether an array will never exist.
    """

    _env: Env
    _hosts: Hosts
    _ask_session: Callable[[Await | Get | Meet | LineLost | TellLaunched], None]
    _has_failed: Callable[[int], bool]
    wires: Wires | None = None
    ask_at_once: Callable[[Await | Get], None] = lambda note: None
    """The session asks, on its thread: before it forgets why an array has failed."""
    on_loss: Callable[[], None] = lambda: None
    """Called when a line is lost, and launches with it."""
    on_over: Callable[[int], None] = lambda lease: None
    """Called when a host takes no more launches of a lease."""
    on_output: Callable[[str, tuple[msg.OutputLine, ...]], None] | None = None
    """Takes what programs write on a host."""
    open: set[str] = field(default_factory=set)
    """The hosts that hear the client, and know it."""
    _meeting: dict[int, str] = field(default_factory=dict)
    _queries: dict[int, _LineQuery] = field(default_factory=dict)
    _next: int = 0
    _holders: dict[int, tuple[ArraySpec, frozenset[str]]] = field(default_factory=dict)
    """Hosts that have arrays of a spec, by the identity of the spec."""
    _bindings: int = 0
    _identity: msg.Identify | None = None
    _settled: deque[tuple[_LineQuery, Any]] = field(default_factory=deque)

    @property
    def name(self) -> str:
        """The node of the lines; empty if there are none."""
        return "" if self.wires is None else self.wires.name

    def is_waiting(self) -> bool:
        """Whether an answer is to come."""
        return bool(self._queries or self._meeting)

    @property
    def asked_hosts(self) -> set[str]:
        """The hosts that have not answered."""
        return {host for query in list(self._queries.values()) for host in list(query.missing)}

    # --- beginning -----------------------------------------------------------------------------------

    def attached(self, message: msg.Attached) -> None:
        """Take the client's number, and the ticket that proves it to hosts."""
        self.forget_all()
        if message.line_ticket:
            self._identity = msg.Identify(message.client, message.line_ticket, is_line=True)

    @handles(Meet)
    def _on_meet(self, sender: Address, note: Meet) -> None:
        self.meet(note.hosts)

    def meet(self, hosts: Iterable[str]) -> None:
        """Begin lines to those of the hosts that have none."""
        if self.wires is not None and self._identity is not None:
            self.wires.within(partial(self._meet, self.wires, self._identity, tuple(hosts)))

    def _meet(self, wires: Wires, identity: msg.Identify, hosts: tuple[str, ...]) -> None:
        lines = self.open.union(self._meeting.values())
        for host in hosts:
            if host not in lines and len(lines) < MOST_LINES and self._hosts.knows(host):
                lines.add(host)
                self._next += 1
                self._meeting[self._next] = host
                wires.introduce(host, self._hosts.endpoint(host))
                wires.tell((store_of(host),), identity)
                wires.tell((store_of(host),), msg.Wait(self._next, ()))

    # --- asking --------------------------------------------------------------------------------------

    def holders(self, spec: ArraySpec) -> frozenset[str]:
        """Return the hosts that have such an array, if all of them have a line; else none."""
        if self._bindings != self._hosts.bindings or len(self._holders) > SPECS:
            self._bindings = self._hosts.bindings
            self._holders.clear()
        entry = self._holders.get(id(spec))
        if entry is None or entry[0] is not spec:
            devices = self._hosts.devices(spec) or ()
            entry = self._holders[id(spec)] = spec, frozenset(one.host for one in devices)
        return entry[1] if entry[1] <= self.open else frozenset()

    def begin(self, note: Await | Get, hosts: Collection[str], boxes: Sequence[Box] = ()) -> int:
        """Wait for the answers of these hosts; returns the number of the question that they get.

        The answer to `Get` has these `boxes`.
        """
        self._next += 1
        self._queries[self._next] = _LineQuery(note, set(hosts), boxes)
        return self._next

    def ask(self, note: Await | Get) -> bool:
        """Ask the hosts of one array; False if the session has to ask."""
        if isinstance(note, Get):
            array, spec = note.array, note.spec
        elif len(note.arrays) == 1:
            ((array, spec),) = note.arrays
        else:
            return False
        if self.wires is None:
            return False
        bindings, hosts = self._hosts.bindings, self.holders(spec)
        if not hosts:
            self._meet_holders(spec)
            return False
        if isinstance(note, Await):
            message: Any = msg.Wait(self.begin(note, hosts), (array,))
        elif (question := self._fetch(note)) is None:
            return False
        else:
            message, hosts = question
        # Now that the question is noted: what the session hears later, it looks for questions to take back.
        if self._has_failed(array) or not hosts <= self.open or bindings != self._hosts.bindings:
            self.give_back(message.request)
            return True
        self.wires.tell([store_of(host) for host in hosts], message)
        return True

    def ask_somehow(self, note: Await | Get) -> None:
        """Ask the hosts here, or have the session ask."""
        if not self.ask(note):
            self._ask_session(note)

    def _meet_holders(self, spec: ArraySpec) -> None:
        hosts = frozenset(one.host for one in self._hosts.devices(spec) or ())
        if hosts and not hosts <= self.open.union(self._meeting.values()):
            self._ask_session(Meet(tuple(sorted(hosts))))

    def small_value(self, spec: ArraySpec) -> SmallValue | None:
        """Return what to ask one host for a whole small value; None if no single host has it."""
        devices = self._hosts.devices(spec)
        if devices is None or spec.size_bytes > msg.INLINE_BYTES:
            return None
        chosen = cover(spec, devices)
        if len(chosen) != 1:
            return None
        ((host, positions),) = chosen.items()
        boxes = tuple([spec.box(position) for position in positions])
        _, total = packed_offsets([box_bytes(box, spec.dtype) for box in boxes])
        return SmallValue(host, tuple(positions), boxes) if total <= msg.INLINE_BYTES else None

    def _fetch(self, note: Get) -> tuple[msg.Fetch, frozenset[str]] | None:
        """Return the question for a small value that one host has, and that host."""
        spec, devices = note.spec, self._hosts.devices(note.spec)
        small = None if note.positions else self.small_value(spec)
        if small is None or devices is None:
            return None
        host, positions, boxes = small
        request = self.begin(note, (host,), boxes)
        return msg.Fetch(request, note.array, spec, devices, positions, None), frozenset((host,))

    # --- answers -------------------------------------------------------------------------------------

    def received(self, host: str, message: Any) -> None:
        """A host has answered; `settle` follows."""
        kind = type(message)
        if kind is msg.Ready:
            query = self._queries.get(message.request)
            if query is None:
                if self._meeting.pop(message.request, None) == host:
                    self.open.add(host)
                return
            if type(query.note) is Get:  # the host knew nothing of the launch that asked
                self.give_back(message.request)
                return
            query.missing.discard(host)
            if not query.missing and self._queries.pop(message.request, None) is not None:
                self._settled.append((query, None))
        elif kind is msg.Fetched:
            query = self._queries.pop(message.request, None)
            if query is not None:
                self._settled.append((query, message.data))
        elif kind is msg.RequestFailed:
            self._meeting.pop(message.request, None)
            if message.error.kind == Disconnected.__name__:  # it does not know the client any more
                self.open.discard(host)
                self.on_loss()
            self.give_back(message.request)
        elif kind is msg.LeaseOver:
            self.on_over(message.lease)
            self._ask_session(TellLaunched())  # hosts may have ignored some
        elif kind is msg.Printed and self.on_output is not None:
            self.on_output(host, message.lines)

    def settle(self) -> None:
        """Settle the futures of what was answered; with no lock, because callbacks may call."""
        while self._settled:
            try:
                query, data = self._settled.popleft()
            except IndexError:  # another thread has settled the last one
                return
            note = query.note
            if type(note) is Await:
                try:  # noqa: SIM105 - no `resolve` and no `suppress`: each wait pays for them
                    note.ready.set_result(None)
                except InvalidStateError:
                    pass
            elif type(note) is Get:
                sizes = [box_bytes(box, note.spec.dtype) for box in query.boxes]
                offsets, _ = packed_offsets(sizes)
                boxes = zip(query.boxes, offsets, strict=True)
                resolve(note.parts, [(box, unpack(data, at, note.spec, box)) for box, at in boxes])

    def give_back(self, request: int, at_once: bool = False) -> None:
        """Have the session ask instead; `at_once` on its thread."""
        query = self._queries.pop(request, None)
        if query is not None:
            self._env.count("questions_given_back")
            (self.ask_at_once if at_once else self._ask_session)(query.note)

    # --- ends ----------------------------------------------------------------------------------------

    def lost(self, host: str) -> None:
        """The line to a host is lost, with all that was on it; called by its node."""
        self.open.discard(host)
        for number, one in list(self._meeting.items()):
            if one == host:
                self._meeting.pop(number, None)
        self.on_loss()
        for number, query in list(self._queries.items()):
            if host in query.missing:
                self.give_back(number)
        self._ask_session(LineLost(host))

    def forget_all(self) -> None:
        """Close all lines; the session asks for what was asked here."""
        self.on_loss()
        hosts = {*self.open, *self._meeting.values()}
        self.open.clear()
        self._meeting.clear()
        if hosts and self.wires is not None:
            self.wires.within(partial(self._drop, self.wires, hosts))
        for number in list(self._queries):
            self.give_back(number)

    def _drop(self, wires: Wires, hosts: Iterable[str]) -> None:
        for host in hosts:
            wires.forget(host)

    def close(self, error: Error) -> None:
        """Fail all that is asked here: the session has ended."""
        self.on_loss()
        self._identity = None
        self.open.clear()
        while self._queries:
            _, query = self._queries.popitem()
            note = query.note
            reject(note.ready if isinstance(note, Await) else note.parts, error)

    def withdraw(self, arrays: Collection[int] | None = None, slice: int = 0) -> None:
        """Have the session ask for these arrays, or for those of a slice: they may be elsewhere, or failed.

        For arrays of failed runs at once. Of a slice, a run that makes one may still have to be told of.
        """
        for number, query in list(self._queries.items()):
            note = query.note
            named = note.arrays if isinstance(note, Await) else ((note.array, note.spec),)
            if any(
                spec.placement.slice == slice if arrays is None else array in arrays
                for array, spec in named
            ):
                if self.wires is not None:
                    hosts = tuple(query.missing)
                    self.wires.within(partial(self._cancel, self.wires, number, hosts))
                self.give_back(number, at_once=arrays is not None)

    def _cancel(self, wires: Wires, request: int, hosts: Iterable[str]) -> None:
        wires.tell([store_of(host) for host in hosts], msg.CancelRequest(request))

    def host_lost(self, host: str) -> None:
        """The session has lost its link to a host."""
        if self.wires is not None and (host in self.open or host in self._meeting.values()):
            self.wires.within(partial(self._drop, self.wires, (host,)))
            self.lost(host)

    def bound(self, message: msg.SliceBound) -> None:
        """A slice lies on these devices, perhaps no longer on others."""
        self.withdraw(slice=message.slice)
        hosts = {device.host for device in message.devices}
        if len(hosts) <= GANG:
            self.meet(sorted(hosts))

    @handles(msg.SliceLost)
    def _on_slice_lost(self, sender: Address, message: msg.SliceLost) -> None:
        self.withdraw(slice=message.slice)
