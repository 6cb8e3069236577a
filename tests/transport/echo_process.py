"""The process of a test: a node that dials another one, greets it, and answers each of its messages."""

from __future__ import annotations

import sys

import uvloop

from pw.core.actors.actor import Actor, handles
from pw.core.ids import Address
from pw.core.messages import PeerLost, Ready, RequestFailed
from pw.transport.access.credentials import Credentials
from pw.transport.links.network import StreamNetwork
from pw.transport.links.node import Node


class Echo(Actor):
    @handles(Ready, RequestFailed)
    def _answer(self, sender: Address, message: Ready | RequestFailed) -> None:
        self.env.send(sender, Ready(message.request))

    @handles(PeerLost)
    def _ended(self, sender: Address, message: PeerLost) -> None:
        loop.stop()


if __name__ == "__main__":
    name, endpoint, *files = sys.argv[1:]
    loop = uvloop.new_event_loop()
    credentials = Credentials.read(files[0]) if files else None
    network = StreamNetwork(
        loop, name, 1, heartbeat_s=0.05, credentials=credentials, insecure=not files
    )
    node = Node(name, loop, network)
    echo = node.add("session", Echo)
    echo.env.introduce("a", endpoint)
    echo.env.send(Address("a", "session"), Ready(-1))
    loop.run_forever()
    node.close()
