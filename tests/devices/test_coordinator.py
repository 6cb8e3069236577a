"""Edges between hosts: before and after the launch, failed, too many, and without a receiver."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pw.core.errors import ErrorReport, TransferFailed
from pw.core.ids import Address, client_id, coordinator_of
from pw.core.landing import Landing
from pw.core.messages import EdgeCredit, EdgeData, EdgeFailed, PeerLost
from pw.core.packing import pack
from pw.core.programs.plan import Receive, Send
from pw.core.programs.reshard import plan_routes
from pw.core.sharding import ArraySpec, DeviceAddress, Placement, Sharding
from pw.devices.host import coordinator as under_test
from pw.devices.host import early_edges
from pw.devices.host.backend import Build
from pw.devices.host.coordinator import ShardCoordinator
from pw.devices.host.value import Value
from tests.stages.actors import World
from tests.stages.fake_devices import FakeBackend, FakeBulk
from tests.stages.scripted import LARGE, SMALL

RUN = client_id(1, 7)
POISON = ErrorReport("ComputationFailed", "there")


def vector(elements: int, devices: int) -> ArraySpec:
    spec: tuple[tuple[str, ...], ...] = (("x",),)
    return ArraySpec(
        (elements,),
        "int64",
        Sharding(("x",), (devices,), spec),
        Placement(1, tuple(range(devices))),
    )


class End:
    """One host's coordinator."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.backend = world.backends[name] = FakeBackend(world, name)
        self.bulk = FakeBulk(world, name)
        self.actor: ShardCoordinator = world.add(
            coordinator_of(name), lambda env: ShardCoordinator(env, self.backend, self.bulk)
        )
        self.arrivals = 0

    def arrived(self, build: Build | None) -> None:
        """An edge has come."""
        self.arrivals += 1
        if build is not None:
            self.backend.submit([build])


class Edge:
    """An array halved over b0 and b1 that a0 wants whole; every end acts when the test says so."""

    def __init__(self, elements: int, seed: int = 0) -> None:
        self.world = World(seed)
        self.ends = {name: End(self.world, name) for name in ("a0", "b0", "b1")}
        self.source, self.wanted = vector(elements, 2), vector(elements, 1)
        self.sources = (DeviceAddress("b0", 0), DeviceAddress("b1", 0))
        self.receiver = (DeviceAddress("a0", 0),)
        self.routes = plan_routes(self.source, self.wanted, self.sources, self.receiver)
        self.whole = np.arange(elements)
        self.value = Value()

    @property
    def arrived(self) -> int:
        return self.ends["a0"].arrivals

    def expect(self, run: int = RUN) -> None:
        receive = Receive(0, 9, self.wanted, self.routes, 1, self.source)

        a = self.ends["a0"]
        a.actor.receiving.expect(run, receive, self.value, self.receiver, a.arrived)

    def decline(self) -> None:
        """The launch at a0 will not come."""
        a = self.ends["a0"].actor
        a.receiving.decline(RUN, Receive(0, 9, self.wanted, self.routes, 1, self.source))
        a.drop_run(RUN)

    def send(
        self, rank: int, error: ErrorReport | None = None, run: int = RUN, *, alone: bool = False
    ) -> None:
        value = Value(error)
        value.alone = alone
        if error is None:
            half = len(self.whole) // 2
            value.payload = {rank: self.whole[rank * half : (rank + 1) * half]}
        end = self.ends[f"b{rank}"]
        send = Send(0, 1, self.source, self.routes[rank])
        began = end.actor.runs.begin(run)
        op = end.actor.sending.send_op(run, began, send, value, self.sources)
        end.backend.submit([op])

    def arrives(self) -> None:
        """Both halves are sent, all comes, and nothing is left of it."""
        for rank in (0, 1):
            self.send(rank)
        self.world.settle()
        assert self.arrived == 1
        np.testing.assert_array_equal(self.value.payload[0], self.whole)
        assert not any(self.census().values()), self.census()

    def play(
        self, order: tuple[str, ...], failing: tuple[int, ...], launch: Callable[[], None]
    ) -> None:
        """Let the launch at a0 and both senders act in this order, and all else at any time between."""
        for act in order:
            if act == "launch":
                launch()
            else:
                rank = ("first", "second").index(act)
                self.send(rank, POISON if rank in failing else None)
            self.world.steps(self.world.random.choice((0, 1, 3, 1000)))
        self.world.settle()

    def census(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for end in self.ends.values():
            for name, count in end.actor.census().items():
                total[name] = total.get(name, 0) + count
            total["landings"] = total.get("landings", 0) + len(end.bulk.landings)
        return total

    def tell(self, name: str, message: object, sender: str) -> None:
        to = coordinator_of(name)
        self.world.mailboxes[name].append((coordinator_of(sender), to, message))
        self.world.drain(name)


ORDERS = list(itertools.permutations(("launch", "first", "second")))


@pytest.mark.parametrize("elements", [SMALL, LARGE])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("failing", [(), (0,), (0, 1)])
def test_either_side_may_be_first(
    order: tuple[str, ...], elements: int, failing: tuple[int, ...]
) -> None:
    """The value arrives once, or the producer's error does, and nothing stays behind."""
    for seed in range(6):
        edge = Edge(elements, seed)
        edge.play(order, failing, edge.expect)
        assert edge.arrived == 1
        if failing:
            assert edge.value.error == POISON
        else:
            np.testing.assert_array_equal(edge.value.payload[0], edge.whole)
        assert not any(edge.census().values()), edge.census()


@pytest.mark.parametrize("elements", [SMALL, LARGE])
@pytest.mark.parametrize("alone", [False, True])
def test_a_value_that_one_host_alone_lacks_is_not_taken_for_failed_everywhere(
    elements: int, alone: bool
) -> None:
    """Another host of the receiver's gang may get it from a host that has it."""
    edge = Edge(elements)
    edge.expect()
    edge.send(0)
    edge.send(1, POISON, alone=alone)
    edge.world.settle()
    assert edge.value.error == POISON
    assert edge.value.alone == alone


def test_a_host_is_lost_while_it_sends() -> None:
    for elements, seed in itertools.product((SMALL, LARGE), range(20)):
        edge = Edge(elements, seed)
        edge.expect()
        edge.send(0)
        edge.send(1)
        edge.world.steps(edge.world.random.randrange(12))
        edge.world.kill("b1")
        del edge.ends["b1"]
        edge.world.settle()
        assert edge.arrived == 1
        if edge.value.error is not None:
            assert edge.value.error.kind == "HostLost"
            assert "b1" in edge.value.error.message
        assert not any(edge.census().values()), edge.census()


def test_the_receiver_is_lost() -> None:
    for elements, seed in itertools.product((SMALL, LARGE), range(20)):
        edge = Edge(elements, seed)
        edge.expect()
        edge.world.steps(edge.world.random.randrange(6))
        edge.send(0)
        edge.world.steps(edge.world.random.randrange(6))
        edge.world.kill("a0")
        del edge.ends["a0"]
        edge.world.settle()
        edge.send(1)
        edge.world.settle()
        # A send to a host that is known to have gone ends with its client.
        edge.ends["b1"].actor.drop_client(1)
        edge.ends["b0"].actor.drop_client(1)
        edge.world.wait(under_test.ORPHAN_S + 1)
        assert not any(edge.census().values()), edge.census()


def test_bytes_that_do_not_fit_the_edge_fail_it() -> None:
    edge = Edge(SMALL)
    edge.expect()
    edge.tell("a0", EdgeData(RUN, 0, b"short"), "b0")
    assert edge.value.error is not None
    assert "5 bytes instead of 32" in edge.value.error.message
    edge.tell("a0", EdgeData(RUN, 0, pack([edge.whole[4:]])), "b1")
    assert edge.arrived == 1
    assert not any(edge.census().values())


def test_a_stranger_cannot_answer_for_a_source() -> None:
    edge = Edge(SMALL)
    edge.expect()
    edge.tell("a0", EdgeFailed(RUN, 0, POISON), "mallory")
    edge.tell("a0", EdgeData(RUN, 0, pack([edge.whole[:4]])), "mallory")
    edge.send(0)
    edge.send(1)
    edge.world.settle()
    np.testing.assert_array_equal(edge.value.payload[0], edge.whole)


def test_what_is_kept_for_later_launches_is_bounded() -> None:
    """An edge that was not kept fails its launch; it is not waited for."""
    edge = Edge(SMALL)
    for end in edge.ends.values():
        end.actor.early.most_bytes = 100
    for serial in range(20):
        for rank in (0, 1):
            edge.send(rank, run=client_id(1, serial))
    edge.world.settle()
    assert edge.world.counters["edges_dropped"] == 37
    assert edge.ends["a0"].actor.early.size_bytes == 96
    kinds: list[Any] = []
    for serial in range(20):
        edge.value = Value()
        edge.expect(client_id(1, serial))
        edge.world.settle()
        kinds.append(edge.value.error and edge.value.error.kind)
    assert edge.arrived == 20
    assert set(kinds) <= {None, "TransferFailed"}
    assert kinds.count("TransferFailed") >= 18
    assert not any(edge.census().values())
    assert edge.ends["a0"].actor.early.size_bytes == 0


def test_parking_again_and_again_leaves_one_timer() -> None:
    """Every edge that came early would otherwise begin a chain of timers that lasts for ten minutes."""
    edge = Edge(SMALL)
    for serial in range(20):
        for rank in (0, 1):
            edge.send(rank, run=client_id(1, serial))
        edge.world.settle()
        edge.expect(client_id(1, serial))
        edge.world.settle()
    assert edge.arrived == 20
    assert len(edge.world.alarms) == 4, "early messages expire, edges are probed, two hosts report"
    edge.world.wait(early_edges.EARLY_S)
    assert edge.world.alarms == [], "nothing is kept, so there is no timer"


@pytest.mark.parametrize("left", [True, False])
def test_what_cannot_be_pushed_is_told_only_to_the_host_that_was_to_have_it(left: bool) -> None:
    """The next host of that name would keep the message for ten minutes."""
    edge = Edge(LARGE)
    sender = edge.ends["b0"]
    sender.actor.hosts_are(frozenset(edge.ends))
    failed: list[Any] = []
    sender.bulk.push = lambda landing, parts, done: failed.append(done)  # type: ignore[method-assign]
    edge.expect()
    edge.send(0)
    edge.world.settle()
    if left:
        sender.actor.hosts_are(frozenset(("b0", "b1")))
    (done,) = failed
    done(TransferFailed("a0 took nothing"))
    edge.world.settle()
    told = edge.world.to(coordinator_of("a0"), EdgeFailed)
    assert [report.error.kind for report in told] == ([] if left else ["TransferFailed"])
    assert not sender.actor.census()["edges_outgoing"]


def test_what_came_a_moment_after_something_else_does_not_wait_twice_as_long() -> None:
    edge = Edge(SMALL)
    edge.send(0)
    edge.world.settle()
    edge.world.wait(0.1)
    edge.send(1)
    edge.world.settle()
    assert edge.census()["edges_parked"] == 2
    edge.world.wait(early_edges.EARLY_S - 0.1)
    assert edge.census()["edges_parked"] == 1
    edge.world.wait(early_edges.EXPIRY_S)
    assert edge.census()["edges_parked"] == 0
    assert edge.world.alarms == [], "nothing is kept, so there is no timer"


def test_the_edges_of_a_client_that_left_are_dropped_after_a_while() -> None:
    edge = Edge(LARGE)
    edge.send(0)
    edge.tell("b1", EdgeCredit(RUN, 0, edge.ends["a0"].bulk.land(LARGE * 4, print)), "a0")
    edge.tell("a0", EdgeFailed(RUN, 5, POISON), "b0")
    edge.world.settle()
    for end in edge.ends.values():
        end.actor.drop_client(1)
    edge.tell("a0", EdgeData(RUN, 6, b"late"), "b0")
    assert edge.world.counters["edges_stale"] == 1
    edge.world.wait(under_test.ORPHAN_S - 1)
    assert edge.census()["edges_outgoing"] == edge.census()["edges_parked"] - 1 == 1
    edge.world.wait(2)
    assert edge.census()["edges_outgoing"] == edge.census()["edges_parked"] == 0
    (refused,) = edge.world.to(coordinator_of("a0"), EdgeFailed)
    assert refused.error.kind == "Disconnected", (
        "the receiver that gave the credit does not wait for ever"
    )
    edge.send(1)
    edge.world.settle()
    assert edge.census()["edges_outgoing"] == 0, "a route without a receiver is not kept"


def test_a_credit_waits_as_long_as_the_run_of_its_sender_is_queued() -> None:
    """Its receiver gives it once, however long what is before that run takes."""
    edge = Edge(LARGE)
    for end in edge.ends.values():
        end.actor.runs.begin(RUN)
    edge.expect()
    edge.world.settle()
    edge.world.wait(early_edges.EARLY_S + early_edges.EXPIRY_S)
    edge.arrives()


def test_a_credit_for_what_is_not_sent_any_more_is_dropped() -> None:
    edge = Edge(LARGE)
    edge.ends["b0"].actor.runs.begin(RUN)
    edge.tell("b0", EdgeCredit(RUN, 0, edge.ends["a0"].bulk.land(LARGE * 4, print)), "a0")
    edge.world.wait(early_edges.EARLY_S)
    assert edge.census()["edges_parked"] == 1
    edge.ends["b0"].actor.runs.end(RUN)
    edge.world.wait(early_edges.EARLY_S)
    assert edge.census()["edges_parked"] == 0
    assert edge.world.alarms == [], "nothing is kept, so there is no timer"


@pytest.mark.parametrize("waited_s", [0.0, under_test.ORPHAN_S + 1])
def test_what_is_queued_is_sent_though_its_client_has_left(waited_s: float) -> None:
    """Other hosts of the gang have their part, so this one must not be refused its own."""
    edge = Edge(LARGE)
    for end in edge.ends.values():
        end.actor.runs.begin(RUN)
        end.actor.drop_client(1)
    edge.expect()
    edge.world.settle()
    edge.world.wait(waited_s)
    edge.arrives()


def test_losses_are_remembered_as_long_as_runs_are_under_way_that_began_before() -> None:
    """Clients come and go under names of their own, and a host lives long."""
    edge = Edge(SMALL)
    sender = edge.ends["b0"].actor

    def lose(*nodes: str) -> None:
        for node in nodes:
            edge.world.mailboxes["b0"].append((Address("b0", "net"), to, PeerLost(node, "it left")))
        edge.world.drain("b0")

    to = coordinator_of("b0")
    lose("client-1", "client-2")
    assert not sender.runs.losses, "nothing is under way that could still be sent"
    sender.hosts_are(frozenset(("a0", "a1")))
    sender.runs.begin(RUN)
    lose("client-3")
    sender.runs.begin(RUN + 1)
    sender.hosts_are(frozenset(("a0",)))
    lose("client-4")
    assert sender.runs.losses == {"client-3", "client-4", "a1"}
    sender.runs.end(RUN)
    assert sender.runs.losses == {"client-4", "a1"}
    sender.runs.end(RUN + 1)
    assert not sender.runs.losses


def test_a_landing_that_is_too_small_fails_the_edge() -> None:
    edge = Edge(LARGE)
    edge.send(0)
    small = Landing(77, 8, 0, "a0", "", "")
    edge.tell("b0", EdgeCredit(RUN, 0, small), "a0")
    edge.world.settle()
    (failed,) = [m for m in edge.world.to(coordinator_of("a0")) if isinstance(m, EdgeFailed)]
    assert "too small" in failed.error.message


def test_a_loss_frees_what_was_kept() -> None:
    edge = Edge(SMALL)
    edge.send(0)
    edge.world.settle()
    assert edge.census()["edges_parked"] == 1
    to = coordinator_of("a0")
    edge.world.mailboxes["a0"].append((Address("a0", "net"), to, PeerLost("b0", "silent")))
    edge.world.drain("a0")
    assert not any(edge.census().values())
    assert edge.ends["a0"].actor.early.size_bytes == 0


@pytest.mark.parametrize("elements", [SMALL, LARGE])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("failing", [(), (0,)])
def test_what_its_receiver_declines_is_kept_nowhere(
    order: tuple[str, ...], elements: int, failing: tuple[int, ...]
) -> None:
    for seed in range(6):
        edge = Edge(elements, seed)
        edge.play(order, failing, edge.decline)
        assert edge.census()["edges_outgoing"] == 0
        edge.world.wait(under_test.ORPHAN_S)
        assert not any(edge.census().values()), edge.census()


@pytest.mark.parametrize("elements", [SMALL, LARGE])
@pytest.mark.parametrize("begun", [False, True])
def test_what_is_declined_is_not_sent_however_late_it_is_made(elements: int, begun: bool) -> None:
    edge = Edge(elements)
    ends = [edge.ends["b0"], edge.ends["b1"]]
    if begun:
        for end in ends:
            end.actor.runs.begin(RUN)
    edge.decline()
    edge.world.settle()
    edge.world.wait(2 * under_test.ORPHAN_S)
    before = len(edge.world.sent)
    for rank in (0, 1):
        edge.send(rank)
    edge.world.settle()
    assert len(edge.world.sent) == before
    assert not any(edge.census().values()), edge.census()


@pytest.mark.parametrize("when", ["before", "after"])
def test_who_declines_is_not_answered_when_the_client_has_left(when: str) -> None:
    """It would keep the answer for ten minutes."""
    edge = Edge(LARGE)
    for act in ("decline", "leave") if when == "before" else ("leave", "decline"):
        if act == "decline":
            edge.decline()
            edge.world.settle()
        else:
            for name in ("b0", "b1"):
                edge.ends[name].actor.drop_client(1)
    edge.world.wait(under_test.ORPHAN_S)
    assert not edge.world.to(coordinator_of("a0"))
    assert not any(edge.census().values()), edge.census()


def test_what_was_sent_before_it_was_declined_leaves_no_credit_behind() -> None:
    edge = Edge(SMALL)
    for rank in (0, 1):
        edge.send(rank)
        edge.ends[f"b{rank}"].actor.runs.end(RUN)
    edge.world.settle()
    edge.decline()
    edge.world.settle()
    assert not any(edge.census().values()), edge.census()


@pytest.mark.parametrize("elements", [SMALL, LARGE])
def test_an_edge_that_goes_both_ways_between_two_hosts(elements: int) -> None:
    """Each host sends the other its half; one hears of the run long before the other."""
    spec = vector(elements, 2)
    before = (DeviceAddress("a0", 0), DeviceAddress("b0", 0))
    after = before[::-1]
    routes = {route.source_host: route for route in plan_routes(spec, spec, before, after)}
    whole = np.arange(elements)
    half = elements // 2
    for seed in range(20):
        world = World(seed)
        ends = {name: End(world, name) for name in ("a0", "b0")}
        values = {name: Value() for name in ends}
        for rank, name in enumerate(ends):
            other = "b0" if name == "a0" else "a0"
            value = Value()
            value.payload = {rank: whole[rank * half : (rank + 1) * half]}
            actor = ends[name].actor
            receive = Receive(0, 9, spec, (routes[other],), 1, spec)
            actor.receiving.expect(RUN, receive, values[name], after, ends[name].arrived)
            began, send = actor.runs.begin(RUN), Send(0, 1, spec, routes[name])
            op = actor.sending.send_op(RUN, began, send, value, before)
            ends[name].backend.submit([op])
            world.steps(1000)
        world.settle()
        assert [end.arrivals for end in ends.values()] == [1, 1]
        np.testing.assert_array_equal(values["a0"].payload[1], whole[half:])
        np.testing.assert_array_equal(values["b0"].payload[0], whole[:half])
        for end in ends.values():
            assert not any(end.actor.census().values())


@pytest.mark.parametrize("order", ORDERS)
def test_a_receiver_without_room_fails_the_edge_and_frees_the_senders(
    order: tuple[str, ...],
) -> None:
    for seed in range(6):
        edge = Edge(LARGE, seed)
        edge.ends["a0"].bulk.full = True
        for act in order:
            if act == "launch":
                edge.expect()
            else:
                edge.send(("first", "second").index(act))
            edge.world.steps(edge.world.random.choice((0, 1, 3, 1000)))
        edge.world.settle()
        assert edge.arrived == 1
        assert edge.value.error is not None
        assert edge.value.error.kind == "OutOfHostMemory"
        assert not any(edge.census().values()), edge.census()
