"""Which hosts are asked for copies, and when a host has none that are needed, by `Copies` alone."""

from __future__ import annotations

from pw.core.ids import CONTROL, client_id, session_of, store_of
from pw.core.messages import Directory, Holding, Holdings, OfferReplica, Peer
from pw.sched.clients import Client
from pw.sched.copies import Copies
from pw.sched.ledger import Ledger
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
