"""The lines of a simulated client: a node beside that of its session, with links of its own.

So a line may be late, lost or cut off while the session's link to the same host is well, and the other way
round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pw.client.session.lines import Lines
from pw.core.actors.actor import Actor, Env
from pw.core.ids import Address
from pw.core.messages import PeerLost, PeerRefused
from pw.testing.sim.node import SimNode
from pw.testing.sim.world import World


class LineEnd(Actor):
    """End of a client's lines to hosts: takes their answers and their news."""

    def __init__(self, env: Env, lines: Lines) -> None:
        super().__init__(env)
        self._lines = lines

    def receive(self, sender: Address, message: object) -> None:
        """Give the client an answer, or news of a host."""
        if isinstance(message, (PeerLost, PeerRefused)):
            self._lines.lost(message.node)
        else:
            self._lines.received(sender.node, message)

    def turn_ended(self) -> None:
        """Settle what was answered."""
        self._lines.settle()


class SimWires:
    """The network of a client's lines (see `pw.client.session.lines.Wires`).

    Args:
        world: where they are.
        name: of their node.
        lines: those of the client.
    """

    def __init__(self, world: World, name: str, lines: Lines) -> None:
        self.name = name
        self.node = SimNode(world, name, 1, "")
        self._end = self.node.add("session", lambda env: LineEnd(env, lines))
        lines.wires = self

    def introduce(self, node: str, endpoint: str) -> None:
        """Make a host reachable."""
        self.node.network.introduce(node, endpoint)

    def tell(self, hosts: Sequence[Address], message: object) -> None:
        """Send a message to an actor on each of some hosts."""
        for host in hosts:
            self._end.env.send(host, message)

    def within(self, act: Callable[[], object]) -> None:
        """Do something with the lines."""
        act()

    def forget(self, node: str) -> None:
        """Close the line to a host."""
        self.node.network.forget(node)
