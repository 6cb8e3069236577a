"""The actor shell: every process of the runtime is a `Node`.

A node owns the mailbox of its actors and gives one message at a time to one actor. An event outside
(a frame, a timer, a call from a thread) only puts a message into the mailbox and requests a turn;
handlers run in that turn. The node's own messages go first, then those of its peers, fairly
(`pw.core.actors.mailbox`). A turn ends with `turn_ended` on the actors that had a message, and with
one flush of the network, so that all messages to one peer leave in one frame. A turn that begins
with few messages also flushes between them, because a peer probably waits for the answer.

A turn is bounded in messages, and in the time for messages of peers, so that a flood does not delay
sockets and timers.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from typing import TypeVar

from pw.core.actors.actor import Actor, Alarm, Env, Timer
from pw.core.actors.mailbox import EVERY, FEW, TURN_S, Mailbox, group_of
from pw.core.ids import Address
from pw.core.messages.roles import Role, role_of
from pw.core.messages.routes import permits
from pw.core.recorder import Recorder
from pw.transport.links.interface import EventLoop, Network
from pw.transport.log import Warnings, audit, log

A = TypeVar("A", bound=Actor)

MESSAGES_PER_TURN = 1000
IDLE_S = 1e-4
"""Seconds without a handled message after which a process is idle."""
FEW_MESSAGES = 2
"""Most messages between which a turn flushes: one frame for all would save little."""


class ActorEnv:
    """The environment of one actor (see `pw.core.actors.actor.Env`)."""

    def __init__(self, node: Node, actor: str) -> None:
        self._node = node
        self.address = Address(node.name, actor)
        self.recorder = node.recorder
        self.now_s = time.monotonic  # uvloop's clock has a resolution of milliseconds
        self.introduce = node.network.introduce
        self.forget = node.network.forget
        self.tenant_of = node.network.tenant_of
        self.islands_of = node.network.islands_of

    def send(self, to: Address, message: object) -> None:
        """Send `message`; it is handled, or leaves, later in this loop turn."""
        node = self._node
        if to.node == node.name:
            node.post(to.actor, message, self.address)
            return
        node.network.send(to, self.address, message)
        node.counters["messages_sent"] += 1
        if not node._turn_requested:
            node.request_turn()

    def call_later(self, delay_s: float, note: object) -> Timer:
        """Deliver `note` to this actor after `delay_s` seconds."""
        alarm = Alarm(note)
        actor = self.address.actor
        alarm.planned = self._node.loop.call_later(delay_s, self._node.post, actor, alarm)
        return alarm

    def log(self, level: str, event: str, **fields: object) -> None:
        """Write one structured line."""
        log(level, event, self.address.node, self.address.actor, **fields)

    def audit(self, event: str, **fields: object) -> None:
        """Write one line about access."""
        audit(event, **fields)

    def count(self, counter: str, amount: int = 1) -> None:
        """Add to a counter of the node."""
        self._node.counters[counter] += amount


class Node:
    """One process's actors on one event loop: mailbox, timers, counters.

    `counters` may be read at any time. `on_crash(actor, error)` is called when a handler raises; by
    default the error is logged and counted, and the actor goes on. All methods but
    `post_threadsafe` belong to the loop's thread.
    """

    def __init__(
        self,
        name: str,
        loop: EventLoop,
        network: Network,
        messages_per_turn: int = MESSAGES_PER_TURN,
    ) -> None:
        self.name = name
        self.messages_per_turn = messages_per_turn
        """Messages after which a turn ends."""
        self.loop = loop
        self.network = network
        self.counters: Counter[str] = Counter()
        self.recorder = Recorder()
        self.on_crash: Callable[[str, BaseException], None] = self._log_crash
        self.actors: dict[str, Actor] = {}
        """Actors of this node by name; messages are delivered to them."""
        self.mailbox = Mailbox(self._group_of)
        self._own = self.mailbox.own
        self._turn_requested = False
        self._is_turning = False
        self._ended_s = 0.0
        """Time at which the last turn ended, in seconds."""
        self._from_threads: deque[tuple[str, object]] = deque()
        self._woken_by_thread = False
        self._unknown: set[str] = set()
        self._warnings = Warnings(name)
        self.closed = False
        self.clock: Callable[[], float] = time.monotonic
        """Measures how long messages take to handle."""
        self.permits: Callable[[str, str, type], bool] = permits
        """Whether a node may send messages of a type to an actor here."""
        network.attach(self)

    def add(self, actor: str, factory: Callable[[Env], A]) -> A:
        """Make an actor with an environment of its own and start to deliver to it.

        Raises:
            ValueError: there is an actor of that name.
        """
        if actor in self.actors:
            raise ValueError(f"node {self.name} has an actor {actor!r} already")
        instance = factory(ActorEnv(self, actor))
        self.actors[actor] = instance
        return instance

    def _group_of(self, node: str) -> str:
        """Clients of one tenant share its part of this node's time, however many they are."""
        identity = self.network.identity_of(node)
        if identity is None or identity.role is not Role.CLIENT:
            return group_of(node)
        return f"tenant {identity.tenant}"

    def remove(self, actor: str) -> None:
        """Forget an actor; later messages to it count as undeliverable."""
        self.actors.pop(actor, None)

    @property
    def backlog(self) -> int:
        """Messages of peers in the mailbox."""
        return self.mailbox.waiting

    def post(self, actor: str, message: object, sender: Address | None = None) -> None:
        """Put a message into the mailbox; `sender` is the actor itself if not given."""
        self._own.append((actor, sender, message))
        if not self._turn_requested:
            self.request_turn()

    def deliver(self, actor: str, message: object, sender: Address) -> None:
        """Put a message of another node into the mailbox, if its sender's role may send it.

        Others are counted and dropped (`pw.core.messages.roles`).
        """
        if self.permits(sender.node, actor, type(message)):
            if len(self._own) < FEW and not self.mailbox.waiting:
                self._own.append((actor, sender, message))
            else:
                self.mailbox.deliver(sender.node, (actor, sender, message))
            if not self._turn_requested:
                self.request_turn()
        else:
            self.refuse(actor, message, sender)

    def refuse(self, actor: str, message: object, sender: Address) -> None:
        """Count a message that its sender may not send."""
        self.counters["messages_refused"] += 1
        kind = type(message).__name__
        words = "a message that its sender may not send"
        key, role = ("role", sender.node, kind), role_of(sender.node)
        self._warnings.once(key, words, sender.node, role=role, message=kind, to=actor)

    def tell_all(self, peer: str, news: object) -> None:
        """Put news of a peer into the mailbox for every actor, behind the messages of that peer."""
        self.mailbox.deliver(peer, (EVERY, None, news))
        self.request_turn()

    def holds(self, peer: str, most: int) -> bool:
        """Whether more than `most` messages of a peer wait; the network is told when to go on."""
        return self.mailbox.holds(peer, most)

    def post_threadsafe(self, actor: str, message: object) -> None:
        """Like `post`, from any thread; wakes the loop once for all pending messages."""
        self._from_threads.append((actor, message))
        self.wake()

    def wake(self) -> None:
        """Have the loop handle what threads have posted; from any thread."""
        if not self._woken_by_thread:
            self._woken_by_thread = True
            try:
                self.loop.call_soon_threadsafe(self._collect)
            except RuntimeError:  # the loop is closed
                if not self.closed:
                    raise

    def request_turn(self) -> None:
        """Handle the mailbox and flush the network soon."""
        if not self._turn_requested and not self.closed:
            self._turn_requested = True
            self.loop.call_soon(self._turn)

    def close(self) -> None:
        """Stop handling messages and close the network."""
        if not self.closed:
            self.closed = True
            self.mailbox.clear()
            self.actors.clear()
            self.network.close()

    def post_here(self, actor: str, message: object) -> None:
        """Like `post_threadsafe`, where a turn or `wake` comes next."""
        self._from_threads.append((actor, message))

    def collect(self) -> None:
        """Put what threads have posted into the mailbox."""
        # Cleared first: a thread that saw it set has appended before.
        self._woken_by_thread = False
        while self._from_threads:
            actor, message = self._from_threads.popleft()
            self._own.append((actor, None, message))

    def look(self) -> None:
        """Handle what threads have posted: one that was interrupted may not have woken the loop."""
        if self._from_threads:
            self._collect()

    def _collect(self) -> None:
        self.collect()
        if not self._turn_requested and not self.closed:
            # At once: a requested turn comes after the loop has polled all sockets.
            self._turn_requested = True
            self._turn()

    def take(self, act: Callable[[], object]) -> None:
        """Do something that may bring messages, and handle them at once if this process was idle.

        Else they are handled soon, together with those that come meanwhile.
        """
        if self.closed or self._turn_requested or self.clock() < self._ended_s + IDLE_S:
            act()
            return
        self._turn_requested = True
        act()
        self._turn()

    def turn_now(self) -> None:
        """Handle the mailbox and flush the network at once, unless a turn is under way."""
        if not self._is_turning and not self.closed:
            self.collect()
            self._turn()

    def _turn(self) -> None:
        self._is_turning = True
        mailbox = self.mailbox
        budget = self.messages_per_turn
        until_s = self.clock() + TURN_S if mailbox.waiting else 0.0
        try:
            while budget > 0 and not self.closed:
                budget = self._handle(budget, until_s)
                if not self._own and (not mailbox.waiting or self.clock() > until_s):
                    break
        finally:
            self._is_turning = self._turn_requested = False
            if not self.closed:
                self.network.flush()
                self._ended_s = self.clock()
                if mailbox.at_work is not None:
                    self._pause()
                if self._own or mailbox.waiting:
                    self.request_turn()

    def _pause(self) -> None:
        """End a turn that has handled messages of peers."""
        mailbox = self.mailbox
        mailbox.end(self.clock())
        while mailbox.to_resume:
            self.network.resume(mailbox.to_resume.pop())

    def _handle(self, budget: int, until_s: float) -> int:
        """Handle messages while there are any, and budget and time; then call `turn_ended`.

        Returns the budget that is left.
        """
        mailbox, own, clock = self.mailbox, self._own, self.clock
        first = len(own)  # of its own messages, those that go before the next of a peer
        eager = first + mailbox.waiting
        if eager > FEW_MESSAGES:
            eager = 0
        touched: dict[str, Actor] = {}
        while budget > 0:
            if first > 0 and own:
                first -= 1
                actor, sender, message = own.popleft()
            else:
                entry = None
                if mailbox.waiting:
                    now_s = clock()
                    if now_s <= until_s:
                        entry = mailbox.take(now_s)
                first = len(own)
                if entry is None:
                    if first:
                        continue
                    break
                actor, sender, message = entry
            budget -= 1
            target = self.actors.get(actor)
            if type(message) is Alarm:
                if message.cancelled or target is None:
                    continue
                message = message.note
            if target is None:
                if actor == EVERY:
                    # Before later messages of that peer, of which some may be there already.
                    own.extendleft([(name, None, message) for name in reversed(self.actors)])
                    first = len(own)
                else:
                    self._undeliverable(actor, sender, message)
                continue
            if eager > 0:
                eager -= 1
                if touched:
                    self.network.flush()
            touched[actor] = target
            try:
                target.receive(sender or Address(self.name, actor), message)
            except Exception as error:  # noqa: BLE001  (the edge of an actor)
                self.on_crash(actor, error)
        for actor, target in touched.items():
            try:
                target.turn_ended()
            except Exception as error:  # noqa: BLE001  (the edge of an actor)
                self.on_crash(actor, error)
        return budget

    def _undeliverable(self, actor: str, sender: Address | None, message: object) -> None:
        self.counters["messages_undeliverable"] += 1
        if actor not in self._unknown and len(self._unknown) < 1000:
            self._unknown.add(actor)
            kind = type(message).__name__
            log("warning", "message to an unknown actor", self.name, actor, message=kind)

    def _log_crash(self, actor: str, error: BaseException) -> None:
        self.counters["actor_crashes"] += 1
        text = "".join(traceback.format_exception(error))
        log("error", "actor crashed", self.name, actor, traceback=text)
