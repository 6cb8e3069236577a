"""Which hosts are offered replicas, and when a drained host has none that are needed."""

from __future__ import annotations

import itertools

import pytest

from pw.core import messages as msg
from pw.core.actors.actor import Actor
from pw.core.ids import CONTROL, RESOURCES, client_id, session_of, store_of
from pw.sched.control.checkpoints.replicas import EMPTIED_S, OFFER_S, PAUSE_DOUBLINGS, ReplicaTable
from pw.sched.control.islands import Islands
from pw.sched.control.sessions import Sessions
from tests.stages.actors import TICKETS, FakeEnv, World
from tests.stages.scripted import split

ARRAY = client_id(1, 5)


class Bench:
    """A client with an input of one box, and what hosts report of its replicas."""

    def __init__(self, *hosts: str) -> None:
        self.world = World()
        env = FakeEnv(self.world, CONTROL)
        sessions = Sessions(env, Islands(env), TICKETS, 1)
        client = sessions.attach(session_of("c"), msg.Attach("c", 1.0, 0), ())
        assert client is not None
        self.client = client
        self.replicas = ReplicaTable(sessions, 60.0)
        self.actor = Actor(env)
        self.actor.compose(self.replicas)
        self.client.slices.hosts[client_id(1, 0)] = set(hosts)
        self.client.lineage.add_input(ARRAY, split(client_id(1, 0), 1))
        self.box = split(client_id(1, 0), 1).box(0)
        self.hosts_are(*hosts)

    def hosts_are(self, *names: str) -> None:
        peers = tuple(msg.Peer(name, name, True) for name in names)
        self.actor.receive(RESOURCES, msg.Directory(peers))

    def has(self, host: str) -> None:
        self.actor.receive(store_of(host), msg.Holdings((msg.Holding(ARRAY, (self.box,)),)))

    def refuses(self, host: str) -> None:
        self.actor.receive(store_of(host), msg.Holdings((msg.Holding(ARRAY, ()),)))

    def wait(self, seconds: float) -> None:
        """Time passes, in which the controller is told what it has asked to be told."""
        until_s = self.world.now_s + seconds
        while self.world.alarms and min(a.due_s for a in self.world.alarms) <= until_s:
            self.world.alarms.sort(key=lambda alarm: alarm.due_s)
            alarm = self.world.alarms.pop(0)
            self.world.now_s = alarm.due_s
            self.actor.receive(CONTROL, alarm.note)
        self.world.now_s = until_s

    def drain(self, *hosts: str) -> None:
        self.actor.receive(RESOURCES, msg.Draining(hosts))

    def has_emptied(self, host: str) -> bool:
        """Whether the controller finds, when it looks next, that the host is empty."""
        before = len(self.world.to(RESOURCES, msg.HostEmptied))
        self.wait(EMPTIED_S)
        return msg.HostEmptied(host) in self.world.to(RESOURCES, msg.HostEmptied)[before:]

    def offers(self, host: str) -> int:
        return len(self.world.to(store_of(host), msg.OfferReplica))


def test_a_deleted_array_does_not_keep_a_host_from_being_empty() -> None:
    """Its replicas are dropped at the end of the turn; until then they have no origin."""
    bench = Bench("a", "b")
    bench.has("a")
    bench.drain("a")
    assert not bench.has_emptied("a")
    assert bench.offers("b") == 1
    bench.client.lineage.release([ARRAY])
    assert bench.has_emptied("a")


def test_a_replica_that_a_host_refused_is_offered_again_and_to_other_hosts_first() -> None:
    bench = Bench("a", "b")
    bench.has("a")
    bench.client.lineage.replicated(ARRAY)
    bench.hosts_are("a", "b")
    assert bench.offers("b") == 1
    bench.wait(10 * OFFER_S)
    assert bench.offers("b") == 1, "it may take that long"
    bench.refuses("b")
    bench.wait(OFFER_S)
    assert bench.offers("b") == 2
    bench.hosts_are("a", "b", "c")
    bench.refuses("b")
    bench.replicas.top_up(bench.client)
    assert (bench.offers("b"), bench.offers("c")) == (2, 1)
    bench.has("c")
    bench.wait(1000)
    assert (bench.offers("b"), bench.offers("c")) == (2, 1)
    assert not bench.world.alarms


def test_a_host_that_never_has_room_is_offered_a_replica_less_and_less_often() -> None:
    bench = Bench("a", "b")
    bench.has("a")
    bench.drain("a")
    asked_s: list[float] = []
    for _ in range(10_000):
        assert not bench.has_emptied("a")
        if bench.offers("b") > len(asked_s):
            asked_s.append(bench.world.now_s)
            bench.refuses("b")
    pauses_s = [after - before for before, after in itertools.pairwise(asked_s)]
    expected = [OFFER_S * 2 ** min(n, PAUSE_DOUBLINGS) for n in range(len(pauses_s))]
    assert len(pauses_s) > PAUSE_DOUBLINGS
    assert pauses_s == pytest.approx(expected, abs=OFFER_S + 0.2)


def test_recovery_waits_until_hosts_with_replicas_are_back() -> None:
    bench = Bench("a", "b")
    bench.has("a")
    assert not bench.replicas.may_come_back
    bench.hosts_are("b")
    bench.replicas.host_lost("a")
    assert bench.replicas.may_come_back
    bench.actor.receive(store_of("b"), msg.HoldsNoMore())
    assert bench.replicas.may_come_back
    bench.actor.receive(
        store_of("a"), msg.HoldsNoMore()
    )  # without them: its supervisor was lost as well
    assert not bench.replicas.may_come_back


def test_recovery_waits_for_hosts_of_a_client_that_have_still_to_come_to_this_controller() -> None:
    bench = Bench("a", "b")
    bench.actor.receive(store_of("a"), msg.HoldsNoMore())
    bench.replicas.claim(bench.client)
    assert bench.replicas.may_come_back
    bench.actor.receive(store_of("b"), msg.HoldsNoMore())
    assert not bench.replicas.may_come_back
    bench.replicas.claim(bench.client)
    assert not bench.replicas.may_come_back, "all of them have told what they had"
    bench.replicas.host_lost("b")
    bench.replicas.claim(bench.client)
    assert bench.replicas.may_come_back
    bench.wait(60.0)
    assert not bench.replicas.may_come_back


def test_recovery_waits_for_replicas_no_longer_than_for_islands() -> None:
    bench = Bench("a", "b")
    bench.has("a")
    bench.replicas.host_lost("a")
    bench.wait(59.0)
    assert bench.replicas.may_come_back
    bench.wait(1.0)
    assert not bench.replicas.may_come_back
