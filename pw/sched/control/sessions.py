"""Which clients are here: lets them in, knows them by the nodes they call from, and tells schedulers of them.

A client that was given up by mistake, or that an earlier controller knew, comes back under its old number; its
session then tells what it has (`pw.sched.control.recovery.resume`). A client that is not known is told
so, and may attach again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container

from pw.core.actor import Env
from pw.core.ids import Address, scheduler_of
from pw.core.messages import (
    AddClient,
    Attach,
    Attached,
    ClientStatus,
    Directory,
    Evicted,
    RemoveClient,
)
from pw.sched.control.client_numbers import ClientNumbers
from pw.sched.control.clients import Client
from pw.sched.control.ledger import Ledger
from pw.sched.control.runs import RUN_CREDITS


def ticket_for(secret: bytes, client: int) -> bytes:
    """What proves to a host that the controller let this client in."""
    return hashlib.blake2b(client.to_bytes(8, "big"), key=secret, digest_size=16).digest()


class Sessions:
    """The controller's part that lets clients in; see the module.

    Args:
        env: of the controller.
        ledger: what the controller knows.
        secret: what tickets are made with; hosts know it, too.
        first_client: number of the first client.
    """

    def __init__(self, env: Env, ledger: Ledger, secret: bytes, first_client: int) -> None:
        self._env = env
        self._ledger = ledger
        self._secret = secret
        self._numbers = ClientNumbers(first_client, ledger.clients)
        self._nodes: dict[str, Client] = {}
        self._shares: dict[int, tuple[float, int]] = {}
        """The share and priority of each client."""
        self._directory = Directory(())

    def __contains__(self, node: str) -> bool:
        """Whether a client calls from this node, so that it is no host."""
        return node in self._nodes

    def at(self, node: str) -> Client | None:
        """The client that calls from a node."""
        return self._nodes.get(node)

    def of(self, sender: Address) -> Client | None:
        """Whose message it is; strangers are told that they are not known."""
        client = self._nodes.get(sender.node)
        if client is None:
            self._env.count("messages_from_strangers")
            reason = "the controller does not know this client (any more)"
            self._env.send(sender, Evicted(reason, may_attach=True))
        return client

    def is_known(self, number: int) -> bool:
        """Whether a client has this number here, or had it not long ago, whatever has become of it."""
        return self._numbers.is_known(number)

    def attach(self, sender: Address, message: Attach, taken: Container[int]) -> Client | None:
        """Let a client in, if it asks for nothing impossible; new ones get no number that is `taken`."""
        number = message.resume
        if not number:
            number = self._numbers.take(taken)
        elif not self._numbers.claim(number):
            self._env.send(sender, Evicted(self._numbers.why_gone(number)))
            return None
        client = Client(sender, number, message.name, repeats=self._numbers.first << 16)
        self._ledger.clients[number] = self._nodes[sender.node] = client
        self._shares[number] = (message.share, message.priority)
        for island in self._ledger.schedulers:
            self._env.send(scheduler_of(island), self._added(number))
        event = "client attached again" if message.resume else "client attached"
        self._env.log("info", event, client=number, node=sender.node, name=message.name)
        self._env.send(sender, self._directory)
        self._env.send(
            sender,
            Attached(
                number,
                ticket_for(self._secret, number),
                RUN_CREDITS,
                tuple(sorted(self._ledger.islands)),
            ),
        )
        return client

    def _added(self, number: int) -> AddClient:
        return AddClient(number, *self._shares[number])

    def status(self) -> tuple[ClientStatus, ...]:
        """All clients, in numbers."""
        clients = self._ledger.clients.values()
        return tuple(client.status(*self._shares[client.number]) for client in clients)

    def leave(self, client: Client, reason: str) -> None:
        """A client is not here any more."""
        self._numbers.left(client.number, reason)
        del self._nodes[client.address.node], self._ledger.clients[client.number]
        del self._shares[client.number]
        for island in self._ledger.schedulers:
            self._env.send(scheduler_of(island), RemoveClient(client.number))

    def scheduler_added(self, island: str) -> None:
        """An island has a scheduler now, which is to know all clients."""
        for number in self._shares:
            self._env.send(scheduler_of(island), self._added(number))

    def hosts_are(self, directory: Directory) -> None:
        """Tell all clients which hosts there are, also those that come later."""
        self._directory = directory
        for client in self._ledger.clients.values():
            self._env.send(client.address, directory)
