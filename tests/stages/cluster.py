"""Nodes on one event loop, whose actors keep what they receive: the stage for transport tests."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvloop

from pw.core.actors.actor import Actor, Env
from pw.core.ids import Address
from pw.core.messages import PeerLost, PeerSilent, Ready
from pw.core.messages.roles import role_of
from pw.transport.access.authority import Authority
from pw.transport.access.credentials import Credentials
from pw.transport.links.local import LocalHub
from pw.transport.links.network import StreamNetwork
from pw.transport.links.node import Node
from tests.stages.daemons import until_true

BOUND_S = 60.0


@functools.cache
def authority() -> Authority:
    """That of all clusters of this process."""
    return Authority.create()


def credentials_of(node: str, folder: Path, **how: Any) -> Credentials:
    """Credentials for a node of this name, in a new file."""
    file = folder / f"{node}-{len(list(folder.iterdir()))}.pem"
    file.touch(0o600)
    file.write_bytes(authority().issue(role_of(node), node, **how))
    return Credentials.read(file)


def wire_bytes(size: int) -> int:
    """About how many bytes so many plain bytes take with TLS; at least as many as they do."""
    return size + (size >> 9) + 64


class Recorder(Actor):
    """Keeps what it receives, and can be told what to do with it."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self.received: list[tuple[Address, object]] = []
        self.silent: list[str] = []
        """Peers that have fallen silent, which they do on a busy machine."""
        self.turns: list[int] = []
        self.react: Callable[[Address, Any], None] = lambda sender, message: None

    def receive(self, sender: Address, message: object) -> None:
        if isinstance(message, PeerSilent):
            self.silent.append(message.node)
            return
        self.received.append((sender, message))
        self.react(sender, message)

    def turn_ended(self) -> None:
        self.turns.append(len(self.received))

    def of(self, kind: type) -> list[Any]:
        return [message for _, message in self.received if type(message) is kind]

    @property
    def lost(self) -> list[tuple[str, str]]:
        return [(message.node, message.reason) for message in self.of(PeerLost)]


class Cluster:
    """Nodes with one recorder each, called "session", on one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, where: str, folder: Path) -> None:
        self.loop = loop
        self.where = where
        self.folder = folder
        self.hub = LocalHub(loop, codec=where == "codec")
        self.nodes: list[Node] = []

    def node(self, name: str, incarnation: int = 1, listens: bool = True, **how: Any) -> Recorder:
        network: Any
        if self.where in ("local", "codec"):
            network = self.hub.network(name)
        else:
            path = f"ipc://{self.folder}/{name}-{len(self.nodes)}"
            bind = path if self.where == "ipc" else "tcp://127.0.0.1:0"
            if self.where == "tls" and "credentials" not in how:
                how["credentials"] = credentials_of(name, self.folder)
            how.setdefault("bind", bind if listens else None)
            if "credentials" not in how:
                how.setdefault("insecure", self.where == "tcp")
            network = StreamNetwork(self.loop, name, incarnation, **how)
        node = Node(name, self.loop, network)
        self.nodes.append(node)
        return node.add("session", Recorder)

    def of(self, recorder: Recorder) -> Node:
        (node,) = [node for node in self.nodes if node.actors.get("session") is recorder]
        return node

    def network(self, recorder: Recorder) -> StreamNetwork:
        found = self.of(recorder).network
        assert isinstance(found, StreamNetwork)
        return found

    def endpoint(self, recorder: Recorder) -> str:
        return getattr(self.of(recorder).network, "endpoint", "here")

    def introduce(self, *recorders: Recorder) -> None:
        for one in recorders:
            for other in recorders:
                if one is not other and self.endpoint(other):
                    one.env.introduce(other.env.address.node, self.endpoint(other))

    def until(self, condition: Callable[[], object]) -> None:
        self.loop.run_until_complete(until_true(condition))

    def close(self) -> None:
        for node in self.nodes:
            node.close()


def make_cluster(where: str, folder: Path, uv: bool) -> Iterator[Cluster]:
    loop = uvloop.new_event_loop() if uv else asyncio.new_event_loop()
    cluster = Cluster(loop, where, folder)
    yield cluster
    cluster.close()
    loop.close()


def numbers(recorder: Recorder) -> list[int]:
    return [message.request for message in recorder.of(Ready)]
