"""Which hosts are asked for copies, and when a host has none that are needed, by `Copies` alone."""

from __future__ import annotations

import itertools

import pytest

from pw.core.ids import CONTROL, client_id, session_of, store_of
from pw.core.messages import Directory, Holding, Holdings, OfferReplica, Peer
from pw.sched.control.checkpoints.replicas import OFFER_S, PAUSE_DOUBLINGS, Copies
from pw.sched.control.clients import Client
from pw.sched.control.ledger import Ledger
from tests.actors import FakeEnv, World
from tests.scripted import split

ARRAY = client_id(1, 5)


class Bench:
    """A client with an input of one box, and what hosts say about its copies."""

    def __init__(self, *hosts: str) -> None:
        self.world = World()
        ledger = Ledger()
        self.client = ledger.clients[1] = Client(session_of("c"), 1, "c")
        self.copies = Copies(FakeEnv(self.world, CONTROL), ledger, 60.0, lambda number: True)
        self.client.lineage.add_input(ARRAY, split(client_id(1, 0), 1))
        self.box = split(client_id(1, 0), 1).box(0)
        self.hosts_are(*hosts)

    def hosts_are(self, *names: str) -> None:
        self.copies.hosts_are(Directory(tuple(Peer(name, name, True) for name in names)))

    def has(self, host: str) -> None:
        self.copies.holds(host, Holdings((Holding(ARRAY, (self.box,)),)))

    def refuses(self, host: str) -> None:
        self.copies.holds(host, Holdings((Holding(ARRAY, ()),)))

    def wait(self, seconds: float) -> None:
        """Time passes, in which the controller is told what it has asked to be told."""
        until_s = self.world.now_s + seconds
        while self.world.alarms and self.world.alarms[0].due_s <= until_s:
            self.world.now_s = self.world.alarms.pop(0).due_s
            self.copies.offer_again()
        self.world.now_s = until_s

    def offers(self, host: str) -> int:
        return len(self.world.to(store_of(host), OfferReplica))


def test_what_was_deleted_a_moment_ago_does_not_keep_a_host_from_being_empty() -> None:
    """Its copies go when the turn ends; until then they are of nothing that is known."""
    bench = Bench("a", "b")
    bench.has("a")
    bench.copies.draining = {"a"}
    assert not bench.copies.emptied("a")
    assert bench.offers("b") == 1
    bench.client.lineage.release([ARRAY])
    assert bench.copies.emptied("a")


def test_a_copy_that_could_not_be_taken_is_offered_again_and_to_others_first() -> None:
    bench = Bench("a", "b")
    bench.has("a")
    bench.client.lineage.copied(ARRAY)
    bench.hosts_are("a", "b")
    assert bench.offers("b") == 1
    bench.wait(10 * OFFER_S)
    assert bench.offers("b") == 1, "it may take that long"
    bench.refuses("b")
    bench.wait(OFFER_S)
    assert bench.offers("b") == 2
    bench.hosts_are("a", "b", "c")
    bench.refuses("b")
    bench.copies.top_up(bench.client)
    assert (bench.offers("b"), bench.offers("c")) == (2, 1)
    bench.has("c")
    bench.wait(1000)
    assert (bench.offers("b"), bench.offers("c")) == (2, 1)
    assert not bench.world.alarms


def test_a_host_that_never_has_room_for_a_copy_is_asked_less_and_less_often() -> None:
    bench = Bench("a", "b")
    bench.has("a")
    bench.copies.draining = {"a"}
    asked_s: list[float] = []
    for _ in range(10_000):
        assert not bench.copies.emptied("a")
        if bench.offers("b") > len(asked_s):
            asked_s.append(bench.world.now_s)
            bench.refuses("b")
        bench.wait(0.1)
    pauses_s = [after - before for before, after in itertools.pairwise(asked_s)]
    expected = [OFFER_S * 2 ** min(n, PAUSE_DOUBLINGS) for n in range(len(pauses_s))]
    assert len(pauses_s) > PAUSE_DOUBLINGS
    assert pauses_s == pytest.approx(expected, abs=OFFER_S + 0.2)


def test_copies_are_waited_for_until_their_hosts_are_back() -> None:
    bench = Bench("a", "b")
    bench.has("a")
    assert not bench.copies.may_come_back
    bench.hosts_are("b")
    bench.copies.host_lost("a")
    assert bench.copies.may_come_back
    bench.copies.is_back("b")
    assert bench.copies.may_come_back
    bench.copies.is_back("a")  # without them: its supervisor was lost as well
    assert not bench.copies.may_come_back


def test_copies_are_not_waited_for_longer_than_islands_are() -> None:
    bench = Bench("a", "b")
    bench.has("a")
    bench.copies.host_lost("a")
    bench.wait(59.0)
    assert bench.copies.may_come_back
    bench.wait(1.0)
    assert not bench.copies.may_come_back
