"""A worker with a certificate of its own asks other islands for what is not its business, over TLS."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pw
from pw.client.connection import current
from pw.core import messages as msg
from pw.core.actors.actor import Actor
from pw.core.ids import CONTROL, CONTROLLER, RESOURCES, Address, client_id, store_of
from pw.core.messages.roles import Role
from pw.core.sharding import Box
from pw.core.tenants import permit
from pw.transport.access.authority import Authority
from pw.transport.access.credentials import Credentials
from pw.transport.links.network import StreamNetwork
from pw.transport.links.node import Node
from tests.cli.test_survival import members
from tests.stages.daemons import Program, send, start_module, until
from tests.stages.inside import number_of

pytestmark = pytest.mark.processes

X = np.arange(4, dtype=np.float32)
BOXES: tuple[Box, ...] = (((0, 2),), ((2, 4),), ((0, 4),))
HOSTS = "one", "two"


class Rogue(Actor):
    """Registers as a host, and keeps what it receives."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.received: list[Any] = []
        self.key = b""

    def receive(self, sender: Address, message: object) -> None:
        self.received.append(message)
        if isinstance(message, msg.HostRegistered):
            self.key = message.key
        elif isinstance(message, msg.Directory):
            for peer in message.peers:
                self.env.introduce(peer.node, peer.endpoint)
        elif isinstance(message, msg.FormIsland):
            joined = msg.IslandJoined(message.island, message.epoch, "cpu", 1, None)
            self.env.send(RESOURCES, joined)

    def register(self, endpoint: str) -> None:
        self.env.send(RESOURCES, msg.RegisterHost("evil", 1, 1, "cpu", endpoint, 1))

    def attack(self, arrays: range) -> None:
        """Send all that hosts send for arrays of theirs."""
        lie = np.full(2, 666, np.float32).tobytes()
        for array in arrays:
            forged = permit(self.key, array, "rogue")
            self.env.send(CONTROL, msg.Uploaded(array, None))
            self.env.send(CONTROL, msg.Holdings((msg.Holding(array, BOXES, None, forged),)))
            for host in map(store_of, HOSTS):
                for box in BOXES:
                    fetch = msg.FetchReplica(array, array, "float32", (box,), None, forged)
                    self.env.send(host, fetch)
                offer = msg.OfferReplica(array, "float32", BOXES, "rogue", forged, forged)
                self.env.send(host, offer)
                self.env.send(host, msg.ReplicaData(array & 0xFF, lie))
        self.env.send(CONTROL, msg.ArraysLost(tuple(arrays)))

    def known(self) -> set[str]:
        """Return the hosts whose endpoints it was told."""
        return {peer.node for directory in self.of(msg.Directory) for peer in directory.peers}

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.received if type(message) is kind]


class Intruder:
    """A process' actor, on a loop of its own in this process."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="rogue", daemon=True).start()

        def make() -> None:
            bind = "tcp://127.0.0.1:0"
            network = StreamNetwork(self.loop, "rogue", 1, bind=bind, credentials=credentials)
            self.node = Node("rogue", self.loop, network)
            self.actor = self.node.add("store", Rogue)
            network.introduce(CONTROLLER, address)
            self.node.add("executor", lambda env: self.actor)
            self.actor.register(network.endpoint)

        self.call(make)

    def call(self, function: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(60)

    def close(self) -> None:
        self.call(self.node.close)
        self.loop.call_soon_threadsafe(self.loop.stop)


@pytest.fixture
def address(tmp_path: Path) -> Iterator[tuple[str, Callable[[Role, str], str]]]:
    """A controller and an island of two hosts, and what issues credentials."""
    authority, started = Authority.create(), list[Program]()

    def issue(role: Role, name: str) -> str:
        file = tmp_path / f"{name}.pem"
        file.touch(0o600)
        file.write_bytes(authority.issue(role, name))
        return str(file)

    def start(module: str, role: Role, name: str, *arguments: str) -> Program:
        variables = {"PW_CREDENTIALS": issue(role, name)}
        started.append(start_module(module, *arguments, folder=tmp_path, **variables))
        return started[-1]

    try:
        bind = "--bind", "tcp://127.0.0.1:0"
        main = start("pw.cli.controller", Role.CONTROLLER, "main", *bind)
        main.until_says("listens at")
        where = main.out.split()[-1]
        for name in HOSTS:
            worker = "--controller", where, "--island", "east", "--island-hosts", "2"
            start("pw.cli.worker", Role.WORKER, name, *worker, "--name", name)
        pw.connect(where, credentials=issue(Role.CLIENT, "me"))
        until(lambda: members("east"), "the island", 90)
        yield where, issue
    finally:
        pw.disconnect()
        for one in reversed(started):
            one.kill()


def die(host: str) -> None:
    """Kill a host's process, and wait for the next one."""
    before = members("east")[host]
    send(before, signal.SIGKILL)
    until(lambda: members("east").get(host) not in (None, before), f"another {host}", 90)


def test_a_worker_of_another_island_reads_and_falsifies_nothing(
    address: tuple[str, Callable[[Role, str], str]],
) -> None:
    where, issue = address
    devices = pw.make_virtual_device_set().add_slice(2, island="east").devices
    sharding = pw.NamedSharding(pw.Mesh(devices, ("x",)), pw.PartitionSpec("x"))
    x = pw.put(X, sharding=sharding)
    y = pw.jit(lambda x: x + 1)(x)
    pw.checkpoint({"x": x, "y": y}).result(60)
    intruder = Intruder(where, Credentials.read(Path(issue(Role.WORKER, "rogue"))))
    try:
        until(lambda: intruder.actor.key, "its own key")
        until(lambda: intruder.actor.known() >= set(HOSTS), "where the hosts are")
        number = current.runtime().client
        arrays = range(client_id(number, 1), client_id(number, 20))
        assert {number_of(x), number_of(y)} <= set(arrays)
        for _ in range(2):
            intruder.call(lambda: intruder.actor.attack(arrays))
        until(
            lambda: len(intruder.actor.of(msg.ReplicaRefused)) >= 4 * len(arrays) * len(BOXES),
            "an answer to each request",
        )
        assert not intruder.actor.of(msg.ReplicaData)
        for name in HOSTS:  # what was on the devices is made of replicas
            die(name)
            np.testing.assert_array_equal(np.asarray(x), X)
            np.testing.assert_array_equal(np.asarray(y), X + 1)
    finally:
        intruder.close()
