"""Which role may send which message to which actor."""

from __future__ import annotations

import time
from typing import Any, get_args

import numpy as np
import pytest

import pw
from pw.client.connection.threads import LoopThread
from pw.core import messages as m
from pw.core.actors.actor import Actor, Env
from pw.core.errors import ErrorReport, PlacementError
from pw.core.ids import CONTROL, CONTROLLER, RESOURCES, Address, executor_of, scheduler_of
from pw.core.messages.roles import TABLE, Role, permits, role_of
from pw.transport.links.link import incarnation
from pw.transport.links.network import StreamNetwork
from pw.transport.links.node import Node
from tests.stages.daemons import until

ERROR = ErrorReport.of(PlacementError("forged"))
LINKS = (m.Hello, m.Refused, m.Heartbeat, m.Goodbye)


def test_names_tell_roles() -> None:
    assert role_of(CONTROLLER) is Role.CONTROLLER
    assert role_of("client-12-ab") is Role.CLIENT
    assert role_of("gpu-7") is Role.WORKER


def test_every_message_between_processes_has_a_sender() -> None:
    known = {kind for _, _, kinds in TABLE for kind in kinds}
    assert known == set(get_args(m.Message)) - set(LINKS)


@pytest.mark.parametrize(
    ("node", "actor", "kind"),
    [
        ("client-1", "resources", m.RegisterHost),
        ("client-1", "resources", m.ReleaseSlice),
        ("client-1", "scheduler/a", m.LaunchGap),
        ("client-1", "controller", m.ArraysLost),
        ("client-1", "executor", m.Leave),
        ("client-1", "coordinator", m.EdgeData),
        ("host", "executor", m.Leave),
        ("host", "executor", m.HostRejected),
        ("host", "controller", m.Run),
        ("host", "controller", m.DrainHost),
        ("host", "store", m.Fetch),
        ("host", "session", m.RunFailed),
    ],
)
def test_other_roles_are_refused(node: str, actor: str, kind: type) -> None:
    assert not permits(node, actor, kind)


def test_local_messages_never_come_from_another_node() -> None:
    for role in ("controller", "client-1", "host"):
        for actor in ("controller", "resources", "scheduler/a", "services"):
            assert not permits(role, actor, m.Submit)
            assert not permits(role, actor, m.IslandLost)
            assert not permits(role, actor, m.StartCoordination)


class Intruder(Actor):
    """Keeps what it receives."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self.received: list[object] = []

    def receive(self, sender: Address, message: object) -> None:
        self.received.append(message)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.received if type(message) is kind]


@pytest.mark.processes
def test_a_client_that_forges_messages_does_no_harm() -> None:
    """A process of this user dials the cluster as a client, and sends what hosts and the controller send."""
    with pw.LocalCluster(hosts_per_island=2, allow_python=True) as cluster:
        devices = pw.make_virtual_device_set().add_slice(devices=2).devices
        before = pw.put(np.arange(4.0), devices[0])
        pids = [host.runtime_pid() for host in cluster.hosts]
        thread = LoopThread("intruder")
        try:

            def enter() -> tuple[Node, Intruder]:
                network = StreamNetwork(thread.loop, "client-evil", incarnation())
                node = Node("client-evil", thread.loop, network)
                intruder = node.add("session", Intruder)
                network.introduce(CONTROLLER, cluster.address)
                intruder.env.send(CONTROL, m.Attach("evil", 1.0, 0))
                return node, intruder

            node, intruder = thread.call(enter)
            until(lambda: intruder.of(m.Attached), "the intruder is attached")
            (peers,) = [directory.peers for directory in intruder.of(m.Directory)[-1:]]
            numbers = [info.number for info in pw.status().clients]

            def attack() -> None:
                send = intruder.env.send
                send(RESOURCES, m.RegisterHost("island-0", 2, 1, "cpu", "ipc:///nowhere", 1))
                send(RESOURCES, m.IslandJoinFailed("island-0", 1, ERROR))
                send(scheduler_of("island-0"), m.LaunchGap(1, 0, 1))
                send(scheduler_of("island-0"), m.GangBroken(1, "forged"))
                for number in numbers:
                    for serial in range(8):
                        send(RESOURCES, m.ReleaseSlice((number << 40) | serial))
                        send(CONTROL, m.ArraysLost(((number << 40) | serial,)))
                for peer in peers:
                    intruder.env.introduce(peer.node, peer.endpoint)
                    send(executor_of(peer.node), m.Leave("forged"))
                    send(executor_of(peer.node), m.HostRejected(ERROR))
                    send(executor_of(peer.node), m.LeaveIsland("island-0", 1, "forged"))

            thread.call(attack)
            time.sleep(1.0)
            assert not intruder.of(m.FormIsland)
            assert np.array_equal(np.asarray(before), np.arange(4.0))
            after = pw.put(np.arange(6.0), devices[1])
            assert np.array_equal(np.asarray(after), np.arange(6.0))
            assert [host.runtime_pid() for host in cluster.hosts] == pids
            (island,) = pw.status().islands
            assert island.formed == 1
            counts = pw.stats()
            assert all(counts[name]["messages_refused"] for name in (CONTROLLER, "island-0-host-0"))
            thread.call(node.close)
        finally:
            thread.stop()
