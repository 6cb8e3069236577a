"""The other end of `bench.security`: two nodes that send each message back, one with TLS and one plain.

    python -m bench.echo CREDENTIALS

It prints the endpoint of each node, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from pw.core.actors.actor import Actor, handles
from pw.core.ids import Address
from pw.core.messages import Ready
from pw.transport.access.credentials import Credentials
from pw.transport.links.link import incarnation
from pw.transport.links.network import StreamNetwork
from pw.transport.links.node import Node

ACTOR = "session"
"""The kind of actor to which workers may send what `Echo` takes."""
DIALLED = "127.0.0.2"
"""The loopback, under an address for which there is no unix socket: so plain tcp is tcp."""


class Echo(Actor):
    """Sends each message back."""

    @handles(Ready)
    def _ready(self, sender: Address, message: Ready) -> None:
        self.env.send(sender, message)


def network(
    loop: asyncio.AbstractEventLoop, name: str, credentials: Credentials | None, bind: str | None
) -> StreamNetwork:
    """A network with TLS if there are credentials, else with plain tcp."""
    return StreamNetwork(
        loop,
        name,
        incarnation(),
        bind=bind,
        advertise="127.0.0.1",
        credentials=credentials,
        insecure=credentials is None,
    )


def main(path: str) -> None:
    """Serve until standard input ends."""
    loop = uvloop.new_event_loop()
    nodes = []
    for name, credentials in (("tls", Credentials.read(path)), ("plain", None)):
        node = Node(name, loop, network(loop, name, credentials, "tcp://*:0"))
        node.add(ACTOR, Echo)
        nodes.append(node)
        print(f"tcp://{DIALLED}:{node.network.endpoint.rpartition(':')[2]}", flush=True)  # type: ignore[attr-defined]
    loop.add_reader(sys.stdin.fileno(), loop.stop)
    loop.run_forever()
    for node in nodes:
        node.close()


if __name__ == "__main__":
    main(sys.argv[1])
