"""A client that sends requests as fast as its peers read them, and ignores the answers.

    python -m bench.flooder ADDRESS

It uses no session, so nothing on its side holds it back. Each line of standard input names a kind
of request; an empty line ends the flood.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import Callable
from typing import Any

import uvloop

from pw.core import messages
from pw.core.actors.actor import Actor, Env, handles
from pw.core.compact import Compact
from pw.core.ids import CONTROL, CONTROLLER, Address, client_id, store_of
from pw.core.programs.program import Computation, Node, Output, Program, ValueRef
from pw.core.sharding import ArraySpec, Placement, Sharding
from pw.transport.links.link import incarnation
from pw.transport.links.network import StreamNetwork
from pw.transport.links.node import Node as ActorNode

NAME = "client-flooder"
IN_A_FRAME = 50


class Flooder(Actor):
    """Attaches, and learns of the hosts."""

    def __init__(self, env: Env, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(env)
        self.ready: asyncio.Future[None] = loop.create_future()
        """Done when the client has a slice."""
        self._client = self._serial = self._slice = 0
        self._hosts: list[str] = []

    def receive(self, sender: Address, message: object) -> None:
        """Handle what a client has to know, and drop the answers."""
        if type(message) in self._handlers:
            super().receive(sender, message)

    @handles(messages.Directory)
    def _directory(self, sender: Address, message: messages.Directory) -> None:
        for peer in message.peers:
            if peer.node not in self._hosts:
                self._hosts.append(peer.node)
                self.env.introduce(peer.node, peer.endpoint)

    @handles(messages.Attached)
    def _attached(self, sender: Address, message: messages.Attached) -> None:
        self._client, self._ticket = message.client, message.ticket
        self._slice = self._id()
        self.env.send(CONTROL, messages.AllocateSlice(self._slice, 1, None, None, None))

    @handles(messages.SliceBound)
    def _bound(self, sender: Address, message: messages.SliceBound) -> None:
        for host in self._hosts:
            self.env.send(store_of(host), messages.Identify(self._client, self._ticket))
        self.ready.set_result(None)

    def _id(self) -> int:
        self._serial += 1
        return client_id(self._client, self._serial)

    def _spec(self) -> ArraySpec:
        sharding = Sharding(("data",), (1,), (("data",),))
        return ArraySpec((1,), "float32", sharding, Placement(self._slice, (0,)))

    def _to_hosts(self, message: Any) -> None:
        for host in self._hosts:
            self.env.send(store_of(host), message)

    # --- kinds of requests ---------------------------------------------------------------------

    def status(self) -> None:
        """Ask the controller for the state of the cluster."""
        self.env.send(CONTROL, messages.GetStatus(self._id()))

    def explain(self) -> None:
        """Ask the controller what holds this client up."""
        self.env.send(CONTROL, messages.Explain(self._id(), tuple(self._hosts)))

    def memory(self) -> None:
        """Ask the controller for the memory of all devices."""
        self.env.send(CONTROL, messages.GetMemory(self._id()))

    def arrays(self) -> None:
        """Announce an array that is never uploaded, and delete it."""
        array = self._id()
        self.env.send(CONTROL, messages.CreateArray(array, self._spec()))
        self.env.send(CONTROL, messages.Delete((array,)))

    def programs(self) -> None:
        """Register a program that does not compile, and release it."""
        program, spec = self._id(), self._spec()
        artifact = b"no computation %d" % program
        digest = hashlib.sha256(artifact).digest()
        step = Computation("step", digest, spec.placement, (spec,), (spec,))
        node = Node(0, (ValueRef(-1, 0),))
        body = Program("step", (step,), (node,), (spec,), (Output(ValueRef(0, 0), spec),))
        artifacts = (messages.Artifact(digest, artifact),)
        self.env.send(CONTROL, messages.RegisterProgram(program, Compact.of(body), artifacts))
        self.env.send(CONTROL, messages.ReleaseProgram(program))

    def stats(self) -> None:
        """Ask hosts for their counters."""
        self._to_hosts(messages.GetStats(self._id()))

    def waits(self) -> None:
        """Ask hosts to answer when an array that was never made is ready."""
        self._to_hosts(messages.Wait(self._id(), (self._id(),)))

    def fetches(self) -> None:
        """Ask hosts for the value of such an array."""
        spec = self._spec()
        self._to_hosts(messages.Fetch(self._id(), self._id(), spec, (), (0,), None))


KINDS = ("status", "explain", "memory", "arrays", "programs", "stats", "waits", "fetches")


async def main(address: str) -> None:
    """Flood as standard input says."""
    loop = asyncio.get_running_loop()
    network = StreamNetwork(loop, NAME, incarnation())
    network.introduce(CONTROLLER, address)
    node = ActorNode(NAME, loop, network)
    actor = node.add("session", lambda env: Flooder(env, loop))
    actor.env.send(CONTROL, messages.Attach("flooder", 1.0, 0))
    await actor.ready
    requests = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin.buffer)
    print("ready", flush=True)
    request: Callable[[], None] | None = None

    async def flood() -> None:
        while True:
            waits = any(link.out.is_waiting for link in network.links.values())
            if request is None or waits:
                await asyncio.sleep(1e-3)
                continue
            for _ in range(IN_A_FRAME):
                request()
            network.flush()
            await asyncio.sleep(0)

    flooding = loop.create_task(flood())
    while line := await requests.readline():
        kind = line.decode().strip()
        request = getattr(actor, kind) if kind in KINDS else None
        print(kind, flush=True)
    flooding.cancel()
    os._exit(0)


if __name__ == "__main__":
    os.nice(10)  # the floods are measured, not the processor time of this process
    uvloop.install()
    asyncio.run(main(sys.argv[1]))
