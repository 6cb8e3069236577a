"""The networks of a client's lines: over sockets, and to hosts in this process."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from pw.client.connection.line_loop import LineLoop
from pw.client.connection.waiting import Waiting
from pw.client.session.lines import Lines, Wires
from pw.core.ids import Address, session_of
from pw.core.messages import PeerLost, PeerRefused
from pw.core.messages.roles import CLIENT_PREFIX
from pw.transport.access.credentials import Credentials
from pw.transport.links.link import incarnation
from pw.transport.links.local import LocalHub
from pw.transport.links.network import StreamNetwork


class ThreadWires(Wires, Protocol):
    """The network of lines, as the threads of a session use it."""

    work: LineWork
    """Flag of whether a thread uses the lines: a thread sets it, with the session's lock, if it is not set."""

    def wait(self, future: Waiting[Any], timeout_s: float) -> None:
        """Handle what comes until a future is settled, if this thread can."""

    def wake(self) -> None:
        """A future was settled, for which a thread may wait here."""

    def look(self) -> None:
        """Handle what has come."""

    def watch(self) -> None:
        """Have the session's loop handle what comes."""

    def forked(self) -> None:
        """This is the copy in a forked process: nothing comes here."""

    def tick(self) -> None:
        """Look whether something was left undone; on the session's thread, now and then."""

    def close(self) -> None:
        """Close all lines; on the session's thread."""


class LineWork(Protocol):
    """Whether something is being done with lines."""

    is_at_work: bool
    """True while it is done, and after the handler of a signal has raised meanwhile: new lines follow then."""


class _AnyTime:
    """Lines that may be used at any time."""

    @property
    def is_at_work(self) -> bool:
        """False, always."""
        return False

    @is_at_work.setter
    def is_at_work(self, now: bool) -> None: ...


class _Room:
    """What a network asks of its node, for the node of lines (`pw.transport.links.interface.Mailroom`)."""

    backlog = 0

    def __init__(self, name: str, counters: Counter[str], lines: Lines) -> None:
        self.name = name
        self.counters = counters
        self._lines = lines

    def holds(self, peer: str, most: int) -> bool:
        """Nothing waits here."""
        return False

    def take(self, act: Callable[[], object]) -> None:
        """Nothing waits here."""
        act()

    def deliver(self, actor: str, message: object, sender: Address) -> None:
        """Take the answer of a host."""
        self._lines.received(sender.node, message)

    def tell_all(self, peer: str, news: object) -> None:
        """Take news of a host."""
        if isinstance(news, (PeerLost, PeerRefused)):
            self._lines.lost(peer)


class _LocalRoom(_Room):
    """Node of lines in this process, which need no lock."""

    def deliver(self, actor: str, message: object, sender: Address) -> None:
        """Take the answer of a host, and settle what waits for it."""
        super().deliver(actor, message, sender)
        self._lines.settle()


class StreamWires:
    """Lines over sockets, which the thread that calls uses itself.

    Args:
        loop: the session's.
        lock: the session's.
        lines: those of the client.
        counters: counters of the session's node.
        credentials: for TLS on tcp.
        insecure: true if tcp may be used without TLS.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        lock: threading.RLock,
        lines: Lines,
        counters: Counter[str],
        credentials: Credentials | None = None,
        insecure: bool = False,
    ) -> None:
        self.name = f"{CLIENT_PREFIX}{secrets.token_hex(8)}.lines"
        self._lines = lines
        self._own = session_of(self.name)
        self._room = _Room(self.name, counters, lines)
        self._loop = LineLoop(loop, lock, lines.settle, lines.is_waiting)
        self.work: LineWork = self._loop
        self._security = credentials, insecure
        self._renew()
        self.wait, self.wake = self._loop.wait, self._loop.wake
        self.look, self.watch = self._loop.look, self._loop.watch
        self.forked = self._loop.forked
        lines.wires = self

    def _renew(self) -> None:
        credentials, insecure = self._security
        self._network = StreamNetwork(
            self._loop,  # type: ignore[arg-type]  # as much of a loop as connections ask
            self.name,
            incarnation(),
            credentials=credentials,
            insecure=insecure,
        )
        self._network.attach(self._room)
        self.tell = partial(self._network.send_now, self._own)

    def introduce(self, node: str, endpoint: str) -> None:
        """Make a host reachable."""
        self._network.introduce(node, endpoint)

    def forget(self, node: str) -> None:
        """Close the line to a host."""
        self._network.forget(node)

    def within(self, act: Callable[[], object]) -> None:
        """Do something with the lines on the session's thread; there are new lines if that cannot be."""
        if not self._loop.within(act):
            self._loop.is_at_work = True

    def tick(self) -> None:
        """Look whether something was left undone."""
        self._loop.tick(self._begin_again)

    def _begin_again(self) -> None:
        """A handler of a signal has raised in the midst of something: begin with new connections."""
        old = self._network
        self._renew()
        for connection in list(old.connections):
            connection.close()
        for host in list(self._lines.open):  # it may not have got all
            self._lines.lost(host)
        self._lines.forget_all()

    def close(self) -> None:
        """Close all lines."""
        self._loop.within(self._network.close)
        self._loop.close()


class LocalWires:
    """Lines to hosts in this process: each message goes through the loop of all of them.

    Args:
        loop: the loop.
        hub: joins the nodes.
        lines: those of the client.
        counters: counters of the session's node.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, hub: LocalHub, lines: Lines, counters: Counter[str]
    ) -> None:
        self.name = f"{CLIENT_PREFIX}{secrets.token_hex(8)}.lines"
        self.work: LineWork = _AnyTime()
        self._loop = loop
        self._own = session_of(self.name)
        self._network = hub.network(self.name)
        self._network.attach(_LocalRoom(self.name, counters, lines))
        self._unsent: deque[tuple[Sequence[Address], object]] = deque()
        lines.wires = self

    def introduce(self, node: str, endpoint: str) -> None:
        """Expect a host; the hub finds it by name."""
        self._network.introduce(node, endpoint)

    def tell(self, hosts: Sequence[Address], message: object) -> None:
        """Send a message to an actor on each of some hosts."""
        self._unsent.append((hosts, message))
        self._loop.call_soon_threadsafe(self._send)

    def _send(self) -> None:
        while self._unsent:
            hosts, message = self._unsent.popleft()
            for host in hosts:
                self._network.send(host, self._own, message)

    def forget(self, node: str) -> None:
        """Do not expect a host any more."""
        self._network.forget(node)

    def within(self, act: Callable[[], object]) -> None:
        """Do something with the lines on the loop."""
        act()

    def wait(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the loop handles all answers."""

    wake = look = watch = forked = tick = wait

    def close(self) -> None:
        """Leave the hub."""
        self._network.close()
