"""A simulated process: the mailbox, turns and timers of `pw.transport.links.node.Node`, on virtual time.

A frame, a timer or a completion of the devices goes into the mailbox and requests a turn. A turn
begins when the process has time, handles what its bound allows, and ends with `turn_ended` on the
actors concerned and one flush of the network. A slow process takes longer for each message, so a
turn handles fewer of peers. A paused process handles nothing until it wakes.
"""

from __future__ import annotations

import traceback
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any, TypeVar

from pw.core.actors.actor import Actor, Alarm, Env, Timer
from pw.core.actors.mailbox import EVERY, FEW, TURN_S, Mailbox
from pw.core.ids import Address
from pw.core.recorder import Recorder
from pw.testing.sim.network import SimNetwork
from pw.testing.sim.recording import LoggedRecorder
from pw.testing.sim.world import Violation, World

A = TypeVar("A", bound=Actor)

INTRUDER = "intruder"
"""The actor of a client that sends what clients may not send (`faults`)."""

_CALL = "call"
"""Instead of an actor's name: the message is a completion, and is called."""

MESSAGE_S = 8e-6
"""The time that a process takes for one message."""


class SimEnv:
    """The `Env` of one actor (see `pw.core.actors.actor.Env`)."""

    def __init__(self, node: SimNode, actor: str) -> None:
        self._node = node
        self._world = node.world
        self.address = Address(node.name, actor)
        self.recorder = node.recorder
        self.introduce = node.network.introduce
        self.tenant_of = node.world.tenant_of
        self.islands_of = node.world.islands_of
        self.forget = node.network.forget

    def send(self, to: Address, message: object) -> None:
        """Send `message`; it is handled, or leaves, later in this turn."""
        node, world = self._node, self._world
        if not node.alive:
            return
        messages: list[Any] | None = None
        if world.tamper is not None:
            messages = world.tamper(self.address, to, message)
        for each in (message,) if messages is None else messages:
            watchers = world.sent_watchers.get(type(each))
            if watchers is not None:
                for watch in watchers:
                    watch(self.address, to, each)
            if to.node == node.name:
                node.post(to.actor, each, self.address)
            else:
                node.network.send(to, self.address, each)
                node.request_turn()

    def now_s(self) -> float:
        """Seconds on this node's own clock."""
        node = self._node
        return node.clock_offset_s + node.clock_rate * self._world.now_s

    def call_later(self, delay_s: float, note: object) -> Timer:
        """Deliver `note` to this actor after `delay_s` seconds of its clock."""
        alarm = Alarm(note)
        node = self._node
        delay_s = max(0.0, delay_s) / node.clock_rate
        alarm.planned = self._world.after(delay_s, node.post, self.address.actor, alarm)
        return alarm

    def log(self, level: str, event: str, **fields: object) -> None:
        """Note one line in the trace."""
        text = " ".join(f"{key}={value}" for key, value in fields.items())
        where = f"{self.address.node}/{self.address.actor}"
        self._world.trace.add((self._world.now_s, where, "", f"log {level}: {event} {text}"))

    def audit(self, event: str, **fields: object) -> None:
        """Note one line about access in the trace."""
        self.log("audit", event, **fields)

    def count(self, counter: str, amount: int = 1) -> None:
        """Add to a counter of the node."""
        self._node.counters[counter] += amount


@dataclass(eq=False)
class SimNode:
    """One incarnation of a process."""

    world: World
    name: str
    incarnation: int
    """Grows with every start of a node of this name."""
    endpoint: InitVar[str]
    """Where other nodes can connect; empty for none."""
    slowness: float
    """The factor by which it is slower than others."""
    silence_s: InitVar[Callable[[str], float]]
    """Returns how long the peer of this name may be silent."""
    alive: bool = True
    paused_until_s: float = 0.0
    counters: Counter[str] = field(default_factory=Counter)
    recorder: Recorder = field(default_factory=Recorder)
    actors: dict[str, Actor] = field(default_factory=dict)
    mailbox: Mailbox = field(default_factory=Mailbox)
    arrivals: dict[str, deque[float]] = field(default_factory=dict)
    """When the messages of each peer came that wait, if a monitor wants to know."""
    _turn_requested: bool = False
    _busy_until_s: float = 0.0

    def __post_init__(self, endpoint: str, silence_s: Callable[[str], float]) -> None:
        random = self.world.streams(f"clock/{self.name}/{self.incarnation}")
        skew = self.world.profile.clock_skew
        self.clock_rate = 1.0 + random.uniform(-skew, skew)
        self.clock_offset_s = random.uniform(0.0, 1e6) if skew else 0.0
        if self.world.profile.timelines:
            self.recorder = LoggedRecorder(lambda: self.world.now_s)
        self.incarnation_began_s = self.world.now_s
        self.network: SimNetwork = SimNetwork(self, endpoint, silence_s)
        self.world.nodes[self.name] = self

    def add(self, actor: str, factory: Callable[[Env], A]) -> A:
        """Make an actor with an environment of its own and start to deliver to it."""
        made = factory(SimEnv(self, actor))
        self.actors[actor] = made
        return made

    @property
    def paused(self) -> bool:
        """Whether the process is stopped at the moment."""
        return self.paused_until_s > self.world.now_s

    def post(self, actor: str, message: object, sender: Address | None = None) -> None:
        """Put a message into the mailbox; `sender` is the actor itself if not given."""
        if self.alive:
            self.mailbox.own.append((actor, sender, message))
            if not self._turn_requested:
                self.request_turn()

    def deliver(self, actor: str, message: object, sender: Address) -> None:
        """Put a message of another node into the mailbox, if its sender's role may send it."""
        if self.world.permits(sender.node, actor, type(message)):
            if self.alive:
                if self.world.waited is not None:
                    self.arrivals.setdefault(sender.node, deque()).append(self.world.now_s)
                entry = (actor, sender, message)
                if len(self.mailbox.own) < FEW and not self.mailbox.waiting:
                    self.mailbox.own.append(entry)
                else:
                    self.mailbox.deliver(sender.node, entry)
                self.request_turn()
        elif sender.actor == INTRUDER:
            self.world.ledger.note("message refused", self.name, sender.node)
            self.counters["messages_refused"] += 1
        else:
            words = f"{sender.node} may not send {type(message).__name__} to {self.name}/{actor}"
            raise Violation("roles", words)

    def tell_all(self, peer: str, news: object) -> None:
        """Put news of a peer into the mailbox for every actor, behind the messages of that peer."""
        if self.alive:
            self.mailbox.deliver(peer, (EVERY, None, news))
            self.request_turn()

    def holds(self, peer: str, most: int) -> bool:
        """Whether more than `most` messages of a peer wait; the network is told when to go on."""
        return self.mailbox.holds(peer, most)

    def call(self, function: Callable[[], None]) -> None:
        """Run a completion on the loop."""
        self.post(_CALL, function)

    def request_turn(self) -> None:
        """Plan a turn for when the process has time."""
        if not self._turn_requested and self.alive:
            self._turn_requested = True
            world = self.world
            at_s = max(world.now_s, self._busy_until_s, self.paused_until_s)
            world.at(at_s, self._turn)

    def die(self) -> None:
        """End the process."""
        self.alive = False
        self.mailbox.clear()
        if self.world.nodes.get(self.name) is self:
            del self.world.nodes[self.name]

    def _turn(self) -> None:
        world = self.world
        self._turn_requested = False
        if not self.alive:
            return
        if self.paused_until_s > world.now_s:
            self.request_turn()
            return
        self._turn_requested = True  # messages sent meanwhile belong to this turn
        handled, cost_s = 0, MESSAGE_S * self.slowness
        most = max(1, round(TURN_S / cost_s))
        while self.mailbox.own or (self.mailbox.waiting and handled < most):
            handled = self._handle(handled, most)
        self._turn_requested = False
        if self.alive:
            self.network.flush()
            self.mailbox.end(world.now_s + handled * cost_s)
            self._busy_until_s = world.now_s + handled * cost_s
            while self.mailbox.to_resume:
                self.network.resume(self.mailbox.to_resume.pop())
            if self.mailbox:
                self.request_turn()

    def _handle(self, handled: int, most: int) -> int:
        """Handle messages, of peers up to so many in this turn; returns how many."""
        world, name = self.world, self.name
        note, watched = world.trace.add, world.handled_watchers
        touched: dict[str, Actor] = {}
        mailbox, cost_s = self.mailbox, MESSAGE_S * self.slowness
        own = mailbox.own
        first = len(own)  # of its own messages, those that go before the next of a peer
        while True:
            entry: Any = None
            if first > 0 and own:
                first -= 1
                entry = own.popleft()
            else:
                if mailbox.waiting and handled < most:
                    entry = mailbox.take(world.now_s + handled * cost_s)
                first = len(own)
                if entry is None:
                    if first:
                        continue
                    break
            actor, sender, message = entry
            handled += 1
            if world.waited is not None and sender is not None and sender.node != name:
                arrived_s = self.arrivals[sender.node].popleft()
                now_s = world.now_s + handled * cost_s
                world.waited(self, sender.node, arrived_s, now_s)
            try:
                if actor == _CALL:
                    message()
                    continue
                if actor == EVERY:
                    own.extendleft([(each, None, message) for each in reversed(self.actors)])
                    first = len(own)
                    continue
                target = self.actors.get(actor)
                if type(message) is Alarm:
                    if message.cancelled:
                        continue
                    message = message.note
                if target is None:
                    self.counters["messages_undeliverable"] += 1
                    continue
                sender = sender or Address(name, actor)
                note((world.now_s, f"{name}/{actor}", f"{sender.node}/{sender.actor}", message))
                to = Address(name, actor)
                watchers = watched.get(type(message), ())
                afterwards = [watch(sender, to, message) for watch in watchers]
                touched[actor] = target
                target.receive(sender, message)
                for check in afterwards:
                    if check is not None:
                        check()
            except Violation:
                raise
            except Exception as error:
                raise self._crashed(actor or "a completion", error) from error
        for actor, target in touched.items():
            try:
                target.turn_ended()
            except Violation:
                raise
            except Exception as error:
                raise self._crashed(actor, error) from error
        return handled

    def _crashed(self, actor: str, error: Exception) -> Violation:
        text = "".join(traceback.format_exception(error))
        return Violation("actors never raise", f"{actor} on {self.name} raised\n{text}")
