"""A simulated process: `pw.transport.links.node.Node` on virtual time.

A turn begins when the process has time. A slow process takes longer for each message, so a turn
handles fewer of peers. A paused process handles nothing until it wakes.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from pw.core.actors.actor import Actor, Env, Timer
from pw.core.ids import Address
from pw.testing.sim.network import SimNetwork
from pw.testing.sim.recording import LoggedRecorder
from pw.testing.sim.world import PlannedEvent, Violation, World
from pw.transport.links.node import ActorEnv, Node

A = TypeVar("A", bound=Actor)

INTRUDER = "intruder"
"""Name of the actor of a client that sends what clients may not send (`faults`)."""

_COMPLETIONS = "completions"
"""Name of the actor to which completions of the devices go."""

MESSAGE_S = 8e-6
"""Seconds that a process takes for one message."""


class SimEnv(ActorEnv):
    """The `Env` of one actor (see `pw.core.actors.actor.Env`)."""

    def __init__(self, node: SimNode, actor: str) -> None:
        super().__init__(node, actor)
        self._world, self._sim_node = node.world, node
        self.now_s = node.now_s

    def send(self, to: Address, message: object) -> None:
        """Send `message`, or its replacement; the receiver handles it later in this turn, or it leaves then."""
        world = self._world
        if self._sim_node.closed:
            return
        messages: list[Any] | None = None
        if world.tamper is not None:
            messages = world.tamper(self.address, to, message)
        for each in (message,) if messages is None else messages:
            for watch in world.sent_watchers.get(type(each), ()):
                watch(self.address, to, each)
            super().send(to, each)

    def call_later(self, delay_s: float, note: object) -> Timer:
        """Deliver `note` to this actor after `delay_s` seconds of its clock."""
        return super().call_later(max(0.0, delay_s) / self._sim_node.clock_rate, note)

    def log(self, level: str, event: str, **fields: object) -> None:
        """Note one line in the trace."""
        text = " ".join(f"{key}={value}" for key, value in fields.items())
        where = f"{self.address.node}/{self.address.actor}"
        self._world.trace.add((self._world.now_s, where, None, f"log {level}: {event} {text}"))

    def audit(self, event: str, **fields: object) -> None:
        """Note one line about access in the trace."""
        self.log("audit", event, **fields)


class _Watched(Actor):
    """Stands for an actor in its node: each message takes time, and monitors see it handled."""

    def __init__(self, node: SimNode, actor: Actor, name: str) -> None:
        self._node = node
        self._actor = actor
        self._address = Address(node.name, name)
        self._where = f"{node.name}/{name}"
        self._is_seen = name != _COMPLETIONS

    def receive(self, sender: Address, message: object) -> None:
        """Have the actor handle a message."""
        node, to = self._node, self._address
        world = node.world
        node.handling(sender)
        if not self._is_seen:
            self._actor.receive(sender, message)
            return
        world.trace.add((world.now_s, self._where, sender, message))
        watchers = world.handled_watchers.get(type(message))
        if watchers is None:
            self._actor.receive(sender, message)
            return
        afterwards = [watch(sender, to, message) for watch in watchers]
        self._actor.receive(sender, message)
        for check in afterwards:
            if check is not None:
                check()

    def turn_ended(self) -> None:
        """Have the actor send its batches."""
        self._actor.turn_ended()


class _Turns:
    """The event loop of a node (see `pw.transport.links.interface.EventLoop`)."""

    def __init__(self, node: SimNode) -> None:
        self._node = node

    def call_soon(self, action: Callable[..., object], /, *args: Any) -> None:
        """Call it when the process has time."""
        node = self._node
        at_s = max(node.world.now_s, node.busy_until_s, node.paused_until_s)
        node.world.at(at_s, self._call, action, args)

    def _call(self, action: Callable[..., object], args: tuple[Any, ...]) -> None:
        if self._node.paused:
            self.call_soon(action, *args)
        elif self._node.alive:
            action(*args)

    def call_later(self, delay_s: float, action: Callable[..., Any], /, *args: Any) -> PlannedEvent:
        """Call it later."""
        return self._node.world.after(delay_s, action, *args)

    call_soon_threadsafe = call_soon


class SimNode(Node):
    """One incarnation of a process.

    Args:
        world: where it lives.
        name: its name, as other nodes address it.
        incarnation: grows with every start of a node of this name.
        endpoint: where other nodes can connect; empty for none.
        slowness: the factor by which it is slower than others.
    """

    network: SimNetwork

    def __init__(
        self, world: World, name: str, incarnation: int, endpoint: str, slowness: float = 1.0
    ) -> None:
        self.world = world
        self.incarnation = incarnation
        self.slowness = slowness
        self.device_slowness = slowness
        """Factor by which its devices are slower than others."""
        self.enqueue_slowness = slowness
        """Factor by which it takes longer to give its devices work that they wait for."""
        self.link_slowness = slowness
        """Factor by which its frames take longer than others."""
        self.unwatched: dict[str, Actor] = {}
        """Actors of the node themselves; the node holds what stands for them."""
        self.paused_until_s = 0.0
        self.busy_until_s = 0.0
        """Time at which the messages that the process has begun to handle are handled, in seconds."""
        self.incarnation_began_s = world.now_s
        self.arrivals: dict[str, deque[float]] = {}
        """Times at which the waiting messages of each peer came, in seconds, if a monitor wants to know."""
        random = world.streams(f"clock/{name}/{incarnation}")
        skew = world.profile.clock_skew
        self.clock_rate = 1.0 + random.uniform(-skew, skew)
        self.clock_offset_s = random.uniform(0.0, 1e6) if skew else 0.0
        world.nodes[name] = self
        super().__init__(name, _Turns(self), SimNetwork(world, name, incarnation, endpoint))
        self.clock = lambda: max(world.now_s, self.busy_until_s)
        self.permits = lambda node, actor, kind: world.permits(node, actor, kind)
        self.on_crash = self._crashed
        if world.profile.timelines:
            self.recorder = LoggedRecorder(lambda: world.now_s)
        self.add(_COMPLETIONS, Actor)

    def add(self, actor: str, factory: Callable[[Env], A]) -> A:
        """Make an actor with an environment of its own and start to deliver to it."""
        added = self.unwatched[actor] = factory(SimEnv(self, actor))
        self.actors[actor] = _Watched(self, added, actor)
        return added

    def now_s(self) -> float:
        """Seconds on this node's own clock."""
        return self.clock_offset_s + self.clock_rate * self.world.now_s

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return not self.closed

    @property
    def paused(self) -> bool:
        """Whether the process is stopped at the moment."""
        return self.paused_until_s > self.world.now_s

    def call(self, function: Callable[[], None]) -> None:
        """Run a completion on the loop."""
        if self.alive:
            self.post(_COMPLETIONS, function)

    def deliver(self, actor: str, message: object, sender: Address) -> None:
        """Put a message of another node into the mailbox, if its sender's role may send it."""
        if self.world.waited is not None and self.permits(sender.node, actor, type(message)):
            self.arrivals.setdefault(sender.node, deque()).append(self.world.now_s)
        super().deliver(actor, message, sender)

    def refuse(self, actor: str, message: object, sender: Address) -> None:
        """Only intruders send what their role may not."""
        if sender.actor != INTRUDER:
            words = f"{sender.node} may not send {type(message).__name__} to {self.name}/{actor}"
            raise Violation("roles", words)
        self.world.ledger.note("message refused", self.name, sender.node)
        super().refuse(actor, message, sender)

    def handling(self, sender: Address) -> None:
        """Take the time for a message that is handled now."""
        begun_s = self.clock()
        self.busy_until_s = begun_s + MESSAGE_S * self.slowness
        if self.world.waited is not None and sender.node != self.name:
            arrived_s = self.arrivals[sender.node].popleft()
            self.world.waited(self, sender.node, arrived_s, self.busy_until_s)

    def close(self) -> None:
        """End the process; it says goodbye to its peers."""
        super().close()
        self._gone()

    def die(self, *, seen: bool) -> None:
        """End the process, which says nothing; if `seen`, the kernel closes its connections."""
        self.closed = True
        self.mailbox.clear()
        self.network.vanish(seen)
        self._gone()

    def _gone(self) -> None:
        if self.world.nodes.get(self.name) is self:
            del self.world.nodes[self.name]

    def _undeliverable(self, actor: str, sender: Address | None, message: object) -> None:
        if sender is not None:
            self.handling(sender)
        super()._undeliverable(actor, sender, message)

    def _crashed(self, actor: str, error: BaseException) -> NoReturn:
        if isinstance(error, Violation):
            raise error
        text = "".join(traceback.format_exception(error))
        raise Violation("actors never raise", f"{actor} on {self.name} raised\n{text}") from error
