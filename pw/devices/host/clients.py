"""The clients that a host knows: each has proven with a ticket which client it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from pw.core.actors.actor import Env, Part, handles
from pw.core.errors import Disconnected, ErrorReport
from pw.core.ids import Address, client_of
from pw.core.messages import Identify
from pw.core.tickets import is_valid
from pw.devices.host.printing import Printing


@dataclass(eq=False, repr=False)
class Clients(Part):
    """Admits clients, and knows their nodes."""

    _env: Env
    _printing: Printing
    gone_clients: set[int]
    """Clients that have left for good."""
    tickets: bytes = b""
    """The public key of the tickets in this epoch; empty outside of one."""
    nodes: dict[str, int] = field(default_factory=dict)
    """The client at each node, of a session or of lines."""
    _lines: set[str] = field(default_factory=set)
    """The nodes that are those of lines."""

    @handles(Identify)
    def _identify(self, sender: Address, message: Identify) -> None:
        valid = is_valid(message.ticket, self.tickets, message.client, sender.node)
        if valid and message.client not in self.gone_clients:
            self.nodes[sender.node] = message.client
            if message.is_line:
                self._lines.add(sender.node)
                self._printing.met_line(message.client, sender)
            else:
                self._printing.met(message.client, sender, message.output)
        else:
            self._env.count("tickets_refused")
            self._env.log("warning", "ticket refused", node=sender.node, client=message.client)

    def at(self, node: str) -> int | None:
        """Return the client at a node, None if there is none."""
        return self.nodes.get(node)

    def nodes_of(self, client: int) -> list[str]:
        """Return the nodes of a client: its sessions', and those of its lines."""
        return [node for node, number in self.nodes.items() if number == client]

    def session_node(self, client: int) -> str | None:
        """Return the node of a client's newest session; None if none has met this host."""
        nodes = [node for node in self.nodes_of(client) if node not in self._lines]
        return nodes[-1] if nodes else None

    def owns(self, sender: Address, array: int) -> bool:
        """Whether an array belongs to the client that has sent a message."""
        return self.nodes.get(sender.node) == client_of(array)

    def forget(self, node: str) -> None:
        """Forget a node whose link is lost; its client may come back."""
        client = self.nodes.pop(node, None)
        if client is None:
            return
        if node in self._lines:
            self._lines.discard(node)
            self._printing.lost_line(client)
        else:
            self._printing.lost(client)

    def refusal(self) -> ErrorReport:
        """Return the error for a session that is not known here."""
        words = "this host does not know this session (any more); connect again with pw.connect()"
        return ErrorReport.of(Disconnected(words), self._env.address.node)
