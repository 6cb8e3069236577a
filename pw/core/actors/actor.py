"""The one actor shell: a synchronous state machine with a mailbox.

A handler takes one typed message, changes its own state, and sends messages. It never blocks, never
awaits, and reaches the outside world only through the `Env` it was given, so that the same class
runs over ZeroMQ, inside one process, and in simulation.

An actor with several concerns is composed of parts. Each part declares the handlers of its own
messages; the actor dispatches to all of them through one table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from pw.core.errors import ErrorReport
from pw.core.ids import Address
from pw.core.messages import PeerLost, PeerRefused, PeerSilent
from pw.core.messages.checks import objection, refusal
from pw.core.recorder import Recorder


class Timer(Protocol):
    """A message that an actor sends to itself, for later."""

    def cancel(self) -> None:
        """Do not deliver the message."""


@dataclass(slots=True, eq=False)
class Alarm:
    """A timer whose note goes through the mailbox: it can be cancelled until the note is handled."""

    note: object
    planned: Timer | None = None
    """Timer that puts the message into the mailbox."""
    cancelled: bool = False

    def cancel(self) -> None:
        """Do not deliver the note."""
        self.cancelled = True
        if self.planned is not None:
            self.planned.cancel()


class Env(Protocol):
    """Clock, timers, messages and log of an actor: its only way to the world."""

    @property
    def address(self) -> Address:
        """This actor's own address."""

    @property
    def recorder(self) -> Recorder:
        """Recorder of this node for timelines (see `pw.trace`)."""

    def send(self, to: Address, message: object) -> None:
        """Send `message`: FIFO for each pair of nodes, at most once. Local when `to` is this node."""

    def now_s(self) -> float:
        """Seconds on a clock that never goes back."""

    def call_later(self, delay_s: float, note: object) -> Timer:
        """Deliver `note` to this actor after `delay_s` seconds; a function is called."""

    def introduce(self, node: str, endpoint: str) -> None:
        """Make `node` reachable at `endpoint`; a link is made when first needed."""

    def forget(self, node: str) -> None:
        """Drop the link to `node` and all that waits to be sent to it."""

    def tenant_of(self, node: str) -> str:
        """The tenant of a peer: "operator" on links without TLS; empty if it never had a link."""

    def islands_of(self, node: str) -> tuple[str, ...]:
        """The only islands that the certificate of a peer allows it to join; empty for all."""

    def log(self, level: str, event: str, **fields: object) -> None:
        """Write one structured line: `level` is debug, info, warning or error."""

    def audit(self, event: str, **fields: object) -> None:
        """Write one line about access: `event` is login, refused, drain or cancel."""

    def count(self, counter: str, amount: int = 1) -> None:
        """Add to a named counter of this node (see `pw.stats`)."""


Handler = TypeVar("Handler", bound=Callable[..., None])


def handles(*kinds: type) -> Callable[[Handler], Handler]:
    """Mark a method `(self, sender, message)` as the handler of these message types."""

    def mark(method: Handler) -> Handler:
        method.__dict__["_handles"] = kinds
        return method

    return mark


Receiver = Callable[[Address, Any], None]
"""Bound handler: takes the sender and the message."""


def _both(first: Receiver, second: Receiver) -> Receiver:
    def handler(sender: Address, message: Any) -> None:
        first(sender, message)
        second(sender, message)

    return handler


_NEWS = (PeerLost, PeerRefused, PeerSilent)
"""News for every actor; an actor without a handler ignores them."""


class Part:
    """Base of a part of an actor: its methods marked with `handles` are in the actor's table."""

    _table: ClassVar[dict[type, str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._table = dict(cls._table)
        for name, member in vars(cls).items():
            for kind in getattr(member, "_handles", ()):
                cls._table[kind] = name

    def handlers(self) -> dict[type, Receiver]:
        """Return the bound handler of each message type that this part handles."""
        return {kind: getattr(self, name) for kind, name in self._table.items()}


class Actor(Part):
    """Base of every actor: dispatches each message to the method marked with `handles`."""

    def __init__(self, env: Env) -> None:
        self.env = env
        self._handlers = self.handlers()

    def compose(
        self, *parts: Part, order: Mapping[type, Sequence[type[Part]]] | None = None
    ) -> None:
        """Add the handlers of `parts`; a message that several handle goes to each.

        Args:
            parts: the parts of this actor.
            order: for messages that parts must handle one after the other, the classes of these parts. Other
                parts come after them.

        Raises:
            ValueError: a part that `order` names does not handle the message.
        """
        order = order or {}
        tables = [(type(part), part.handlers()) for part in parts]
        for kind in dict.fromkeys((*order, *(kind for _, table in tables for kind in table))):
            first = list(order.get(kind, ()))
            concerned = [(part, table[kind]) for part, table in tables if kind in table]
            if missing := set(first) - {part for part, _ in concerned}:
                raise ValueError(f"{missing} do not handle {kind.__name__}")
            concerned.sort(key=lambda one: (*first, one[0]).index(one[0]))
            for _, handler in concerned:
                earlier = self._handlers.get(kind)
                self._handlers[kind] = handler if earlier is None else _both(earlier, handler)

    def receive(self, sender: Address, message: object) -> None:
        """Handle one message; a type this actor does not know is counted and dropped.

        A message of another node is refused if it makes no sense (`pw.core.messages.checks`).
        """
        handler = self._handlers.get(type(message))
        if handler is None:
            if isinstance(message, _NEWS):
                return
            if callable(message):
                message()
                return
            self.env.count("messages_unexpected")
            self.env.log(
                "warning", "unexpected message", sender=sender, message=type(message).__name__
            )
            return
        if sender.node != self.env.address.node and (error := objection(message)) is not None:
            self._refuse(sender, message, error)
            return
        handler(sender, message)

    def _refuse(self, sender: Address, message: object, error: ErrorReport) -> None:
        self.env.count("messages_refused")
        if (answer := refusal(message, error)) is not None:
            self.env.send(sender, answer)

    def turn_ended(self) -> None:
        """Send what was batched; called when the mailbox of this node is empty."""
