"""The clients that are attached, by number and by the node that they call from.

A client of an earlier controller comes back under its old number and tells what it has
(`pw.sched.control.recovery.resume`). A client that this controller has given up is told why, and its
session ends.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.errors import AccessRefused, ErrorReport, QuotaExceeded
from pw.core.events import ClientEvent, Sink
from pw.core.ids import CONTROLLER, Address, client_of, scheduler_of
from pw.core.rights import Resource
from pw.core.tenants import NO_SECRET, OPERATOR, Claims
from pw.core.tickets import Tickets
from pw.sched.control.clients import Client
from pw.sched.control.islands import Islands
from pw.sched.control.lineage import Lineage
from pw.sched.control.usage import Usage

RUN_CREDITS = 512
"""Number of runs that a client may have in flight before its calls block."""

UNPROVEN = (
    "it did not get proof that this session is the one that it was with the controller before: the session's "
    "tenant, or the key of the controller's certificate, is another one now"
)

CLIENT_NUMBERS = 1 << 23
"""Number above all client numbers: an id has 63 bits, and 40 of them are the client's to give."""

REFUSED_AGAIN_S = 1.0
"""Seconds between two refusals to one node that are written down, at least."""
REFUSED_KEPT = 4096

SILENT_S = 3.0
"""Seconds of silence of a client from which on it is reported: a busy machine may delay a heartbeat or two."""

UNNAMED = "a call did not end on it, or its hosts could not go on together"
"""Reason for the end of an epoch, for clients of other tenants than that whose call this was."""

HOLDERS = Address(CONTROLLER, "names")
"""Address in the place of that of a process, for clients that hold what is published."""

GIVEN_KEPT = 1 << 16
"""Number of clients that have left and are remembered; each `pw status` is a client."""


class ClientNumbers:
    """The numbers that one controller gives; each start begins at another `first` number.

    Args:
        first: the number to begin with.
        here: the numbers of clients that are here.
        end: numbers are from 1 to below this one.
        kept: how many numbers of clients that have left are remembered.
    """

    def __init__(
        self, first: int, here: Container[int], end: int = CLIENT_NUMBERS, kept: int = GIVEN_KEPT
    ) -> None:
        self.first = first % end or 1
        self._here = here
        self._end, self._kept = end, kept
        self._next = self.first
        self._reasons: OrderedDict[int, str] = OrderedDict()
        """Reason for which each client left; empty while it is here."""

    def take(self, in_use: Container[int]) -> int:
        """Return a number that is not `in_use`."""
        while self._next in in_use or self.is_known(self._next):
            self._skip()
        number = self._next
        self._give(number)
        self._skip()
        return number

    def _give(self, number: int) -> None:
        self._reasons[number] = ""
        if len(self._reasons) > self._kept:
            self._reasons.popitem(last=False)

    def _skip(self) -> None:
        self._next = (self._next + 1) % self._end or 1

    def claim(self, number: int) -> bool:
        """Give a client the number that it had before; return False if it cannot have the number."""
        if not 0 < number < self._end or self.is_known(number):
            return False
        self._give(number)
        return True

    def left(self, number: int, reason: str) -> None:
        """The client with this number has left; without a reason it may come back."""
        if not reason:
            self._reasons.pop(number, None)
        elif number in self._reasons:
            self._reasons[number] = reason

    def why_gone(self, number: int) -> str:
        """Return why a client that comes back cannot have its number any more."""
        reason = self._reasons.get(number)
        if not reason:
            return "it does not know this session, nor did the one before it; its arrays are gone"
        if reason.startswith("silent"):
            return f"{msg.in_words(reason)}, and was given up"
        return (
            f"the connection between them was lost ({msg.in_words(reason)}), and so it was given up. "
            "If the network was not cut, the controller was paused for longer than its clients wait"
        )

    def is_known(self, number: int) -> bool:
        """Return whether a client has this number here, or had it not long ago."""
        return number in self._here or number in self._reasons


class Sessions(Part):
    """The attached clients."""

    def __init__(
        self,
        env: Env,
        islands: Islands,
        tickets: Tickets,
        first_client: int,
        events: Sink | None = None,
        claims: Claims = NO_SECRET,
        usage: Usage | None = None,
        heard_s: Callable[[str], float | None] = lambda node: None,
    ) -> None:
        self.env = env
        self.events = events
        """Publisher of events; None where nothing is published."""
        self.islands = islands
        self._tickets = tickets
        self.claims = claims
        self.usage = usage or Usage()
        """The ledger of all that clients have."""
        self._heard_s = heard_s
        self._recent: dict[str, float] = {}
        """Time of the last refusal to each node that was written down, in seconds."""
        self._clients: dict[int, Client] = {}
        self._nodes: dict[str, Client] = {}
        self._calling: dict[int, Client] = {}
        """Clients with a process, by number."""
        self._busy: dict[int, None] = {}
        """Numbers of holders that may have something to do at the end of a turn."""
        self._numbers = ClientNumbers(first_client, self._clients)
        self._directory = msg.Directory(())

    @property
    def clients(self) -> Collection[Client]:
        """Clients in the order in which they attached."""
        return self._clients.values()

    @property
    def calling(self) -> Collection[Client]:
        """Clients with a process, in the order in which they attached."""
        return self._calling.values()

    def wake(self, number: int) -> None:
        """Have the end of each turn look at a holder: its stream, lineage or slices have something to do."""
        if number in self._clients:
            self._busy[number] = None

    def rest(self, number: int) -> None:
        """Undo `wake`."""
        self._busy.pop(number, None)

    @property
    def is_busy(self) -> bool:
        """Whether the end of this turn looks at a holder."""
        return bool(self._busy)

    def busy(self) -> list[Client]:
        """Return the holders that may have something to do at the end of a turn."""
        return [client for number in self._busy if (client := self.get(number)) is not None]

    def get(self, number: int) -> Client | None:
        """Return the client with a number."""
        return self._clients.get(number)

    def owner(self, identifier: int) -> Client | None:
        """Return the client that an id belongs to."""
        return self._clients.get(client_of(identifier))

    def at(self, node: str) -> Client | None:
        """Return the client that calls from a node."""
        return self._nodes.get(node)

    def of(self, sender: Address) -> Client | None:
        """Return the client that sent a message; tell the sender if it is not attached."""
        client = self._nodes.get(sender.node)
        if client is None:
            self.env.count("messages_from_strangers")
            reason = "the controller does not know this client (any more)"
            self.env.send(sender, msg.Evicted(reason, may_attach=True))
        return client

    def is_known(self, number: int) -> bool:
        """Return whether a client has this number here, or had it not long ago."""
        return self._numbers.is_known(number)

    def silent_s(self, client: Client) -> float:
        """Return how long nothing has come from a client, in seconds; 0 unless that is long."""
        heard_s = 0.0 if client.is_holder else self._heard_s(client.address.node) or 0.0
        return heard_s if heard_s >= SILENT_S else 0.0

    def attach(self, sender: Address, message: msg.Attach, in_use: Container[int]) -> Client | None:
        """Let a client in, unless its old number is gone; a new number is not `in_use`."""
        number, tenant = message.resume, self.env.tenant_of(sender.node)
        if not tenant:
            self.refused(sender.node, tenant, message.name, "its tenant is not known")
            self.env.send(sender, msg.Evicted("it has no link to this process"))
            return None
        if number and not self.claims.is_valid(message.claim, number, tenant):
            reason = f"it has not proven that it was client {number}"
            self.refused(sender.node, tenant, message.name, reason)
            self.env.send(sender, msg.Evicted(UNPROVEN))
            return None
        rights = self.usage.rights.of(tenant)
        if number and not self._numbers.claim(number):
            self.env.send(sender, msg.Evicted(self._numbers.why_gone(number)))
            return None
        if not number:
            try:
                rights.check(message.share, message.priority)
                self.usage.check(tenant, Resource.CLIENTS, 1)
            except QuotaExceeded as error:
                self.refused(sender.node, tenant, message.name, str(error))
                self.env.send(sender, msg.Evicted(str(error), error=ErrorReport.of(error)))
                return None
            number = self._numbers.take(in_use)
        usage = self.usage.attach(number, tenant)
        asked = message.share, message.priority
        client = Client(sender, number, message.name, *asked, tenant, message.line, usage)
        client.recovery_s = message.recovery_s
        client.repeats = self._numbers.first << 16
        self._clients[number] = self._nodes[sender.node] = self._calling[number] = client
        self.islands.tell_all(self._added(client))
        event = "client attached again" if message.resume else "client attached"
        self.env.log("info", event, client=number, node=sender.node, name=message.name)
        self.env.audit("login", tenant=tenant, name=message.name, node=sender.node, client=number)
        if self.events is not None:
            self.events.publish(ClientEvent("attached", number, message.name))
        self.env.send(sender, self._directory)
        ready = tuple(sorted(self.islands.islands))
        ticket = self._tickets.ticket(number, sender.node)
        claim = self.claims.claim(number, tenant)
        line_ticket = self._tickets.ticket(number, message.line) if message.line else b""
        attached = msg.Attached(number, ticket, RUN_CREDITS, ready, claim, line_ticket)
        self.env.send(sender, attached)
        return client

    def hold(self, name: str, tenant: str, in_use: Container[int]) -> Client:
        """Return a new client without a process, which owns what is published under a name.

        What it is told, nothing hears (`tell`); it is here until `leave`.
        """
        number = self._numbers.take(in_use)
        usage = self.usage.attach(number, tenant, is_holder=True)
        lineage = Lineage(wake=partial(self.wake, number))
        client = Client(HOLDERS, number, name, tenant=tenant, usage=usage, lineage=lineage)
        client.repeats = self._numbers.first << 16
        self._clients[number] = client
        self.islands.tell_all(self._added(client))
        return client

    def tell(self, client: Client, message: object) -> None:
        """Send a message to a client, if a process calls for it."""
        if not client.is_holder:
            self.env.send(client.address, message)

    def sight(self, asker: int) -> Callable[[int], bool]:
        """Return whether the client `asker` may see what the client with a number has, or had."""
        client = self._clients.get(asker)
        if client is None:
            return lambda number: number == asker
        return lambda number: client.may_touch(self._clients.get(number))

    def refused(self, node: str, tenant: str, name: str, reason: str) -> None:
        """Count a request that a client has no right to; write it down, once in a while for each node."""
        self.env.count("requests_refused")
        now_s = self.env.now_s()
        if now_s - self._recent.get(node, -math.inf) < REFUSED_AGAIN_S:
            return
        if len(self._recent) >= REFUSED_KEPT:
            self._recent.clear()
        self._recent[node] = now_s
        self.env.audit("refused", tenant=tenant, name=name, node=node, reason=reason)

    def objection(self, asker: Client, what: str, owners: str) -> ErrorReport:
        """Refuse a request; return the error, which names the tenant and says who may.

        Args:
            asker: the client that has asked.
            what: what it may not do, to follow "may not".
            owners: those who may, besides operators; empty if none.
        """
        words = f"tenant {asker.tenant!r} may not {what}"
        self.refused(asker.address.node, asker.tenant, asker.name, words)
        who = f"{owners} and the tenant {OPERATOR!r}" if owners else f"the tenant {OPERATOR!r}"
        error = AccessRefused(f"{words}; {who} may")
        return ErrorReport.of(error)

    def leave(self, client: Client, reason: str) -> None:
        """Forget a client, and have all schedulers forget it.

        One that came back before any island did may come again: no host was told that it has left, and a
        controller that was slow to begin reads first of connections that clients have given up.
        """
        may_return = client.resuming is not None and not self.islands.schedulers
        self._numbers.left(client.number, "" if may_return else reason)
        if not client.is_holder:
            del self._nodes[client.address.node], self._calling[client.number]
            if self.events is not None:
                self.events.publish(ClientEvent("left", client.number, client.name, reason))
        del self._clients[client.number]
        self.rest(client.number)
        self.usage.leave(client.number)
        self.islands.tell_all(msg.RemoveClient(client.number))

    def scheduler_added(self, island: str) -> None:
        """Tell a new scheduler of all clients."""
        for client in self.clients:
            self.env.send(scheduler_of(island), self._added(client))

    def _added(self, client: Client) -> msg.AddClient:
        rights = self.usage.rights.of(client.tenant)
        return msg.AddClient(
            client.number,
            *self.weight_of(client),
            client.tenant,
            rights.share,
            client.address.node,
            client.line,
            rights.device_memory,
        )

    def rights_changed(self) -> None:
        """Tell all schedulers the shares, priorities and memory of clients under new rights."""
        for client in self.clients:
            self.islands.tell_all(self._added(client))

    def weight_of(self, client: Client) -> tuple[float, int]:
        """Return the share and the priority that a client has: those that it asked for, within its rights."""
        return self.usage.rights.of(client.tenant).bounded(client.share, client.priority)

    def error_for(self, client: Client, ended: msg.EpochEnded) -> ErrorReport:
        """Return why an epoch has ended, without another tenant's work.

        The holder of a name tells its errors to readers of all tenants.
        """
        whose = self._clients.get(ended.client)
        if not ended.client or (client.may_touch(whose) and not client.is_holder):
            return ended.error
        words = f"island {ended.island!r} stopped: {UNNAMED}"
        return msgspec.structs.replace(ended.error, message=words)

    @handles(msg.Directory)
    def _hosts_are(self, sender: Address, directory: msg.Directory) -> None:
        """Tell all clients which hosts there are, also those that attach later."""
        self._directory = directory
        for client in self.calling:
            self.tell(client, directory)


@dataclass(eq=False)
class ControlPart(Part):
    """Base of the controller's parts: each knows the clients and the islands."""

    sessions: Sessions

    def __post_init__(self) -> None:
        self._env = self.sessions.env
        self._islands = self.sessions.islands
        self._events = self.sessions.events


Method = TypeVar("Method", bound=Callable[..., None])


def handles_client(*kinds: type) -> Callable[[Method], Callable[..., None]]:
    """Mark a method `(self, client, message)` of a `ControlPart` for these messages of clients.

    The sender must be attached; if not, it is told so, and the message is dropped.
    """

    def mark(method: Method) -> Callable[..., None]:
        @handles(*kinds)
        def guarded(self: ControlPart, sender: Address, message: Any) -> None:
            client = self.sessions.of(sender)
            if client is not None:
                method(self, client, message)

        return guarded

    return mark


def handles_host(*kinds: type) -> Callable[[Method], Callable[..., None]]:
    """Mark a method `(self, host, message)` of a `ControlPart` for these messages of hosts.

    The same message from a client is counted and dropped.
    """

    def mark(method: Method) -> Callable[..., None]:
        @handles(*kinds)
        def guarded(self: ControlPart, sender: Address, message: Any) -> None:
            if self.sessions.at(sender.node) is not None:
                self._env.count("messages_refused")
            else:
                method(self, sender.node, message)

        return guarded

    return mark
