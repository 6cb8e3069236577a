"""The actor shell: every process of the runtime is a `Node`.

A node owns the mailbox of its actors and gives one message at a time to one actor. An event outside
(a frame, a timer, a call from a thread) only puts a message into the mailbox and requests a turn;
handlers run in that turn. A turn ends with `turn_ended` on the actors that had a message, and with
one flush of the network, so that all messages to one peer leave in one frame. A turn that begins
with few messages also flushes between them, because a peer probably waits for the answer.

A turn handles a bounded number of messages, so that a flood does not delay sockets and timers.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from typing import TypeVar

from pw.core.actor import Actor, Alarm, Env, Timer
from pw.core.ids import Address
from pw.core.recorder import Recorder
from pw.transport.log import log
from pw.transport.network import Network

A = TypeVar("A", bound=Actor)

MESSAGES_PER_TURN = 1000
FEW_MESSAGES = 2
"""With so few messages, a turn flushes between them: one frame for all would save little."""


class ActorEnv:
    """The environment of one actor (see `pw.core.actor.Env`)."""

    def __init__(self, node: Node, actor: str) -> None:
        self._node = node
        self.address = Address(node.name, actor)
        self.recorder = node.recorder
        self.now_s = time.monotonic  # uvloop's clock has a resolution of milliseconds
        self.introduce = node.network.introduce
        self.forget = node.network.forget

    def send(self, to: Address, message: object) -> None:
        """Send `message`; it is handled, or leaves, later in this loop turn."""
        node = self._node
        if to.node == node.name:
            node.post(to.actor, message, self.address)
            return
        node.network.send(to, self.address, message)
        node.counters["messages_sent"] += 1
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

    def count(self, counter: str, amount: int = 1) -> None:
        """Add to a counter of the node."""
        self._node.counters[counter] += amount


class Node:
    """One process's actors on one event loop: mailbox, timers, counters.

    `counters` may be read at any time. `on_crash(actor, error)` is called when a handler raises; by
    default the error is logged and counted, and the actor goes on. All methods but
    `post_threadsafe` belong to the loop's thread.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, network: Network) -> None:
        self.name = name
        self.loop = loop
        self.network = network
        self.counters: Counter[str] = Counter()
        self.recorder = Recorder()
        self.on_crash: Callable[[str, BaseException], None] = self._log_crash
        self._actors: dict[str, Actor] = {}
        self._mailbox: deque[tuple[str, Address | None, object]] = deque()
        self._turn_requested = False
        self._from_threads: deque[tuple[str, object]] = deque()
        self._woken_by_thread = False
        self._unknown: set[str] = set()
        self._closed = False
        network.attach(self)

    def add(self, actor: str, factory: Callable[[Env], A]) -> A:
        """Make an actor with an environment of its own and start to deliver to it.

        Raises:
            ValueError: there is an actor of that name.
        """
        if actor in self._actors:
            raise ValueError(f"node {self.name} has an actor {actor!r} already")
        made = factory(ActorEnv(self, actor))
        self._actors[actor] = made
        return made

    def remove(self, actor: str) -> None:
        """Forget an actor; later messages to it count as undeliverable."""
        self._actors.pop(actor, None)

    @property
    def backlog(self) -> int:
        """Messages in the mailbox."""
        return len(self._mailbox)

    def post(self, actor: str, message: object, sender: Address | None = None) -> None:
        """Put a message into the mailbox; `sender` is the actor itself if not given."""
        self._mailbox.append((actor, sender, message))
        if not self._turn_requested:
            self.request_turn()

    def post_to_all(self, message: object) -> None:
        """Put a message into the mailbox once for every actor."""
        for actor in self._actors:
            self.post(actor, message)

    def post_threadsafe(self, actor: str, message: object) -> None:
        """Like `post`, from any thread; wakes the loop once for all pending messages."""
        self._from_threads.append((actor, message))
        if not self._woken_by_thread:
            self._woken_by_thread = True
            try:
                self.loop.call_soon_threadsafe(self._collect)
            except RuntimeError:  # the loop is closed
                if not self._closed:
                    raise

    def request_turn(self) -> None:
        """Handle the mailbox and flush the network soon."""
        if not self._turn_requested and not self._closed:
            self._turn_requested = True
            self.loop.call_soon(self._turn)

    def close(self) -> None:
        """Stop handling messages and close the network."""
        if not self._closed:
            self._closed = True
            self._mailbox.clear()
            self._actors.clear()
            self.network.close()

    def _collect(self) -> None:
        # Cleared first: a thread that saw it set has appended before.
        self._woken_by_thread = False
        while self._from_threads:
            actor, message = self._from_threads.popleft()
            self._mailbox.append((actor, None, message))
        if not self._turn_requested and not self._closed:
            # At once: a requested turn comes after the loop has polled all sockets.
            self._turn_requested = True
            self._turn()

    def _turn(self) -> None:
        budget = MESSAGES_PER_TURN
        try:
            while budget > 0 and not self._closed:
                budget = self._handle(budget)
                if not self._mailbox:
                    break
        finally:
            self._turn_requested = False
            if not self._closed:
                self.network.flush()
                if self._mailbox:
                    self.request_turn()

    def _handle(self, budget: int) -> int:
        """Empty the mailbox, or spend the budget, then call `turn_ended`; the budget left."""
        mailbox = self._mailbox
        eager = len(mailbox) if len(mailbox) <= FEW_MESSAGES else 0
        touched: dict[str, Actor] = {}
        while mailbox and budget > 0:
            budget -= 1
            actor, sender, message = mailbox.popleft()
            target = self._actors.get(actor)
            if type(message) is Alarm:
                if message.cancelled or target is None:
                    continue
                message = message.note
            if target is None:
                self._undeliverable(actor, message)
                continue
            touched[actor] = target
            if eager > 0:
                eager -= 1
                self.network.flush()
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

    def _undeliverable(self, actor: str, message: object) -> None:
        self.counters["messages_undeliverable"] += 1
        if actor not in self._unknown and len(self._unknown) < 1000:
            self._unknown.add(actor)
            kind = type(message).__name__
            log("warning", "message to an unknown actor", self.name, actor, message=kind)

    def _log_crash(self, actor: str, error: BaseException) -> None:
        self.counters["actor_crashes"] += 1
        text = "".join(traceback.format_exception(error))
        log("error", "actor crashed", self.name, actor, traceback=text)
