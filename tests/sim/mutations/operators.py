"""Operators that break a simulated cluster from outside; the table of mutations combines them.

Some act on messages on their way (`alter`, `drop`, `double`, `mix`, `reorder`, `replay`), some on messages
that an actor handles (`hear`, `mishear`, `skip`, `after`), some on methods and attributes (`wrap`, `forget`,
`put`).

Where something is, a path says. It begins with one of

- `cluster`: the simulated cluster, once;
- `supervisor`: each simulated host, once;
- `host`: each new incarnation of a host;
- `scheduler`: each new scheduler, and `memory`, its count of device memory, when its island is formed;
- `client`: each session of a user;
- `node`, `controller`, `resources`, `events`: those of each start of the controller.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from msgspec.structs import replace

from pw.core import messages as m
from pw.core.ids import CONTROLLER, Address
from pw.testing.sim.cluster import SimCluster

Install = Callable[[SimCluster], None]
"""Breaks a cluster before anything happens in it."""


def together(*installs: Install) -> Install:
    """Break several things."""

    def install(cluster: SimCluster) -> None:
        for each in installs:
            each(cluster)

    return install


# --- messages on their way -----------------------------------------------------------------------


def on_the_way(kind: Any, make: Callable[[Random], Callable[[Address, Any], Any]]) -> Install:
    """Send other messages in place of those of a kind.

    For each cluster, `make` gets a source of chance, and returns a function of the receiver and the message.
    That returns the message to send instead, a list of messages, or None for the message itself.
    """

    def install(cluster: SimCluster) -> None:
        change = make(cluster.world.streams("mutation"))

        def tamper(sender: Address, to: Address, message: Any) -> list[Any] | None:
            changed = change(to, message) if isinstance(message, kind) else None
            return changed if isinstance(changed, list | None) else [changed]

        cluster.world.tamper = tamper

    return install


def alter(kind: Any, change: Callable[[Any], Any], share: float = 1.0) -> Install:
    """Send what `change` returns in place of a share of the messages of a kind."""

    def make(random: Random) -> Callable[[Address, Any], Any]:
        return lambda to, message: change(message) if random.random() < share else None

    return on_the_way(kind, make)


def drop(
    kind: Any, share: float = 1.0, when: Callable[[Any], bool] = lambda message: True
) -> Install:
    """Lose a share of the messages of a kind for which `when` is true."""
    return alter(kind, lambda message: [] if when(message) else None, share)


def mix(kind: Any, field: str, share: float = 1.0, *, apart: bool = False) -> Install:
    """Give a message the bytes of the last one of its size; if `apart`, only of one to another node."""

    def make(random: Random) -> Callable[[Address, Any], Any]:
        last: dict[int, tuple[str, bytes]] = {}

        def change(to: Address, message: Any) -> Any:
            data = getattr(message, field)
            node, earlier = last.get(len(data), (to.node, data))
            last[len(data)] = (to.node, data)
            is_mixed = random.random() < share and not (apart and node == to.node)
            return replace(message, **{field: earlier}) if is_mixed else None

        return change

    return on_the_way(kind, make)


def reorder(share: float) -> Install:
    """Exchange a share of the launches with the next one to the same host."""

    def make(random: Random) -> Callable[[Address, Any], Any]:
        held: dict[str, m.Launch] = {}

        def change(to: Address, message: m.Launch) -> Any:
            first = held.pop(to.node, None)
            if first is not None:
                numbers = message.sequence, first.sequence
                if message.sequence != first.sequence + 1 or message.run == first.run:
                    return [first, message]
                return [replace(message, sequence=numbers[1]), replace(first, sequence=numbers[0])]
            if message.arguments is None or random.random() >= share:
                return None
            held[to.node] = message
            return []

        return change

    return on_the_way(m.Launch, make)


def double(share: float) -> Install:
    """Send one launch of each epoch to a host twice, under two numbers."""

    def make(random: Random) -> Callable[[Address, Any], Any]:
        shift: dict[tuple[str, int], int] = {}

        def change(to: Address, message: m.Install | m.Launch | m.Discard) -> Any:
            key = (to.node, message.epoch)
            moved = replace(message, sequence=message.sequence + shift.get(key, 0))
            if not isinstance(message, m.Launch) or key in shift or random.random() >= share:
                return moved
            shift[key] = 1
            return [moved, replace(moved, sequence=moved.sequence + 1)]

        return change

    return on_the_way(m.Install | m.Launch | m.Discard, make)


def replay(cluster: SimCluster) -> None:
    """When a host gets its first launch of an epoch, send it its first one of the last epoch as well."""
    first: dict[str, m.Launch] = {}

    def change(sender: Address, to: Address, message: Any) -> None:
        if not isinstance(message, m.Launch):
            return
        old = first.get(to.node)
        if old is None or old.epoch < message.epoch:
            first[to.node] = message
            node = cluster.world.nodes.get(to.node)
            if old is not None and node is not None:
                scheduler = f"scheduler/{to.node.rpartition('-')[0]}"
                node.post(to.actor, old, Address(CONTROLLER, scheduler))

    cluster.world.tamper = change


# --- messages at their actors --------------------------------------------------------------------


def hear(path: str, kind: Any, around: Callable[..., None]) -> Install:
    """Have an actor do `around(actor, receive, sender, message)` for messages of a kind."""

    def act(actor: Any) -> None:
        receive = actor.receive

        def heard(sender: Address, message: Any) -> None:
            if isinstance(message, kind):
                around(actor, receive, sender, message)
            else:
                receive(sender, message)

        actor.receive = heard

    return each(path, act)


def mishear(path: str, kind: Any, change: Callable[[Any], Any]) -> Install:
    """Have an actor handle what `change` returns in place of a message."""
    return hear(path, kind, lambda _, receive, sender, message: receive(sender, change(message)))


def skip(path: str, kind: Any, when: Callable[[Any], bool]) -> Install:
    """Have an actor not handle messages of a kind for which `when` is true."""
    return hear(path, kind, lambda _, receive, *of: None if when(of[1]) else receive(*of))


def after(path: str, kind: Any, act: Callable[[Any, Any], Any]) -> Install:
    """When an actor has handled a message, do `act(actor, message)`."""
    return hear(path, kind, lambda actor, receive, *of: (receive(*of), act(actor, of[1])))


# --- methods and attributes ----------------------------------------------------------------------


def each(path: str, act: Callable[[Any], None]) -> Install:
    """Do something to what the path names."""
    root, _, rest = path.partition(".")

    def found(part: Any) -> None:
        for name in filter(None, rest.split(".")):
            part = getattr(part, name)
        act(part)

    def install(cluster: SimCluster) -> None:
        def formed(sender: Address, to: Address, message: m.IslandFormed) -> Callable[[], None]:
            def then() -> None:
                scheduler = cluster.schedulers.get(to.actor.partition("/")[2])
                if scheduler is not None and scheduler.admission.memory is not None:
                    found(scheduler.admission.memory)

            return then

        if root == "cluster":
            found(cluster)
        elif root == "supervisor":
            for host in cluster.hosts:
                found(host)
        elif root == "memory":
            cluster.world.watch_handled(m.IslandFormed, formed)
        elif root in ("client", "host", "scheduler"):
            cluster.on_start[root].append(found)
        else:
            found(getattr(cluster, root))
            cluster.on_start["controller"].append(lambda _: found(getattr(cluster, root)))

    return install


def put(path: str, value: Any) -> Install:
    """Set an attribute."""
    owner, _, name = path.rpartition(".")
    return each(owner, lambda part: setattr(part, name, value))


def forget(path: str, answer: Any = None) -> Install:
    """Have a method do nothing but give this answer."""
    return put(path, lambda *args, **names: answer)


def wrap(path: str, around: Callable[..., Any]) -> Install:
    """Call `around(method, *args)` in place of a method."""
    owner, _, name = path.rpartition(".")

    def act(part: Any) -> None:
        method = getattr(part, name)
        setattr(part, name, lambda *args, **names: around(method, *args, **names))

    return each(owner, act)
