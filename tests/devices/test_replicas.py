"""Replicas in host memory: restoring arrays from them, offering them, and refusing them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pw.core import messages as msg
from pw.core.errors import ErrorReport
from pw.core.ids import CONTROL, CONTROLLER, Address, client_id, session_of, store_of
from pw.core.landing import Landing
from pw.core.packing import flat_bytes
from pw.core.sharding import ArraySpec, Box, DeviceAddress, dtype_of
from pw.core.tenants import NO_SECRET
from pw.devices.host.replica_memory import Replica
from pw.devices.host.store import ObjectStore
from pw.devices.host.value import Value
from tests.stages.actors import TICKETS, Recorder, World
from tests.stages.fake_devices import FakeBackend, FakeBulk
from tests.stages.scripted import LARGE, SMALL, split

ARRAY = client_id(1, 5)
SLICE = client_id(1, 0)
PROOF = NO_SECRET.permit(ARRAY, CONTROLLER, "a")
"""Of what the controller has offered host a."""
HERE = (DeviceAddress("a", 0), DeviceAddress("a", 1))
SIZES = pytest.mark.parametrize("elements", [SMALL, LARGE])


class Node:
    """The store of one host, and nothing else of it."""

    def __init__(self, world: World, name: str, replicas: Sequence[Replica] = ()) -> None:
        self.name = name
        self.backend = world.backends[name] = FakeBackend(world, name)
        self.bulk = FakeBulk(world, name)
        self.store: ObjectStore = world.add(
            store_of(name), lambda env: ObjectStore(env, self.backend, self.bulk, dict, replicas)
        )
        self.store.joins("i", 1, TICKETS.public, 8, 8)
        self.store.replicas.memory.announce()


class Bench:
    """Hosts a, b and c, of which some hold halves of an array that host a needs whole."""

    def __init__(self, elements: int = SMALL, seed: int = 0, **halves: tuple[int, ...]) -> None:
        self.world = World(seed)
        self.world.add(CONTROL, Recorder)
        self.client: Recorder = self.world.add(session_of("x"), Recorder)
        self.spec = split(SLICE, 2, elements)
        self.whole = np.arange(elements)
        self.boxes: list[Box] = [self.spec.box(0), self.spec.box(1)]
        self.nodes = {
            name: Node(self.world, name, [self.half(half) for half in halves.get(name, ())])
            for name in "abc"
        }
        self.hosts_are(*self.nodes)
        self.say(msg.Identify(1, TICKETS.ticket(1, "x")))
        self.a = self.nodes["a"].store

    def half(self, half: int) -> Replica:
        middle = len(self.whole) // 2
        return Replica(ARRAY, self.spec.box(half), self.whole[half * middle : (half + 1) * middle])

    def hosts_are(self, *names: str) -> None:
        for node in self.nodes.values():
            node.store.replicas.registered(NO_SECRET.key_of(node.name))
            node.store.replicas.hosts_are(frozenset(names))

    def say(self, message: object, sender: Address | None = None, to: str = "a") -> None:
        self.world.mailboxes[to].append((sender or session_of("x"), store_of(to), message))
        self.world.drain(to)

    def restore(self, *sources: tuple[int, str]) -> None:
        named = tuple(msg.BoxSource(self.spec.box(half), host) for half, host in sources)
        permits = {host: NO_SECRET.permit(ARRAY, host, "a") for _, host in sources}
        self.say(msg.Restore(ARRAY, ARRAY, self.spec, HERE, named, permits), CONTROL)

    def offer(self, boxes: tuple[Box, ...], holder: str, to: str = "a") -> None:
        """The controller offers a host what another one has."""
        permit, proof = NO_SECRET.permit(ARRAY, holder, to), NO_SECRET.permit(ARRAY, CONTROLLER, to)
        self.say(msg.OfferReplica(ARRAY, "int64", boxes, holder, permit, proof), CONTROL, to)

    def ask(
        self, request: int, by: str, *boxes: Box, permit: bytes | None = None, **how: Any
    ) -> None:
        """A host asks host a for boxes."""
        if permit is None:
            permit = NO_SECRET.permit(ARRAY, "a", by)
        asked = {"dtype": "int64", "landing": None} | how
        question = msg.FetchReplica(request, ARRAY, boxes=boxes, permit=permit, **asked)
        self.say(question, store_of(by))

    def uploaded(self) -> list[ErrorReport | None]:
        self.world.settle()
        return [message.error for message in self.world.to(CONTROL, msg.Uploaded)]

    def restored(self) -> np.ndarray[Any, Any]:
        """The array as it lies on host a."""
        value = self.a.value(ARRAY)
        assert value is not None
        return np.concatenate([value.payload[0], value.payload[1]])

    def held(self, name: str) -> list[Box]:
        return [one.box for one in self.nodes[name].store.replicas.memory.all()]

    def check_idle(self) -> None:
        """Nothing is under way any more."""
        self.world.settle()
        for node in self.nodes.values():
            if node.name in self.world.actors:
                assert not node.bulk.landings
                assert not node.store.census()["replicas_fetched"]


def copies(*halves: tuple[int, str]) -> tuple[tuple[int, str], ...]:
    return halves


@SIZES
@pytest.mark.parametrize(
    ("held", "sources"),
    [
        ({"a": (0, 1)}, copies()),
        ({"b": (0, 1)}, copies((0, "b"), (1, "b"))),
        ({"b": (0,), "c": (1,)}, copies((0, "b"), (1, "c"))),
        ({"a": (1,), "c": (0,)}, copies((0, "c"), (1, "a"))),
        ({"b": (0,), "c": (0, 1)}, copies((0, "b"), (1, "b"), (0, "c"), (1, "c"))),
        ({"c": (0, 1)}, copies((0, "a"), (0, "b"), (0, "c"), (1, "gone"), (1, "c"))),
    ],
)
def test_an_array_is_restored_from_copies_wherever_they_are(
    elements: int, held: dict[str, tuple[int, ...]], sources: tuple[tuple[int, str], ...]
) -> None:
    for seed in range(5):
        bench = Bench(elements, seed, **held)
        bench.restore(*sources)
        assert bench.uploaded() == [None]
        np.testing.assert_array_equal(bench.restored(), bench.whole)
        bench.check_idle()


def test_however_much_is_held_a_message_tells_of_a_part() -> None:
    world = World()
    world.add(CONTROL, Recorder)
    data = np.arange(4)
    held = [Replica(client_id(1, number), ((0, 4),), data) for number in range(5)]
    memory = Node(world, "a", held).store.replicas.memory
    memory.told_at_once = 2
    memory.announce()
    _, *told = world.to(CONTROL, msg.Holdings)  # the first is told when the node is made
    assert [len(message.holdings) for message in told] == [2, 2, 1]
    arrays = [holding.array for message in told for holding in message.holdings]
    assert arrays == [client_id(1, number) for number in range(5)]


def test_requests_wait_for_an_array_that_will_be_restored() -> None:
    bench = Bench(b=(0, 1))
    bench.say(msg.Fetch(1, ARRAY, bench.spec, HERE, (1,), None))
    bench.say(msg.Wait(2, (ARRAY,)))
    bench.world.settle()
    assert not bench.client.received
    bench.restore((0, "b"), (1, "b"))
    bench.say(msg.Wait(3, (ARRAY,)))
    bench.world.settle()
    assert bench.client.of(msg.Fetched) == [msg.Fetched(1, bench.whole[SMALL // 2 :].tobytes())]
    assert {message.request for message in bench.client.of(msg.Ready)} == {2, 3}


def test_what_no_copy_has_of_a_dropped_array_is_refused() -> None:
    """Nothing would answer it otherwise: no launch makes the array any more."""
    bench = Bench(a=(0,))
    bench.a.drop(ARRAY, "donated to 'f'")
    for request in (0, 1):
        bench.say(msg.Fetch(request, ARRAY, bench.spec, HERE, (request,), None))
    bench.world.settle()
    assert bench.client.of(msg.Fetched) == [msg.Fetched(0, bench.whole[: SMALL // 2].tobytes())]
    assert [m.error.kind for m in bench.client.of(msg.RequestFailed)] == ["ArrayDeleted"]


def test_a_donated_array_can_be_restored() -> None:
    bench = Bench(a=(0, 1))
    bench.a.drop(ARRAY, "donated to 'f'")
    bench.restore()
    bench.say(msg.Wait(1, (ARRAY,)))
    bench.world.settle()
    assert bench.client.received == [msg.Ready(1)]


@SIZES
def test_a_source_that_is_lost_is_replaced_by_the_next(elements: int) -> None:
    outcomes = set()
    for seed in range(40):
        bench = Bench(elements, seed, b=(0, 1), c=(0,))
        bench.restore((0, "b"), (0, "c"), (1, "b"))
        bench.world.steps(bench.world.random.randrange(8))
        bench.world.kill("b")
        (error,) = bench.uploaded()
        outcomes.add(error and error.kind)
        if error is None:
            np.testing.assert_array_equal(bench.restored(), bench.whole)
        else:
            assert "host b" in error.message
        bench.check_idle()
    assert outcomes == {None, "HostLost"}


@SIZES
def test_a_host_that_has_another_copy_helps_whoever_is_lost(elements: int) -> None:
    for seed in range(40):
        bench = Bench(elements, seed, b=(0, 1), c=(0, 1))
        bench.restore((0, "b"), (0, "c"), (1, "b"), (1, "c"))
        bench.world.steps(bench.world.random.randrange(8))
        if seed % 2:
            bench.world.kill("b")
        else:  # the controller knows first
            bench.nodes["b"].store.replicas.memory.forget(lambda array: True)
            bench.hosts_are("a", "c")
        assert bench.uploaded() == [None]
        np.testing.assert_array_equal(bench.restored(), bench.whole)
        bench.check_idle()


def test_what_nobody_has_is_lost() -> None:
    bench = Bench(b=(0,))
    bench.say(msg.Wait(1, (ARRAY,)))
    bench.restore((0, "b"))
    (error,) = bench.uploaded()
    assert error is not None
    assert error.kind == "HostLost"
    assert "no host is said to have it" in error.message
    assert not bench.client.received, "it may be had in another way"
    data = b"".join(half.tobytes() for half in np.split(bench.whole, 2))
    aligned = data[:32].ljust(64, b"\0") + data[32:]
    bench.say(msg.Upload(ARRAY, bench.spec, HERE, aligned, "i", 1))
    assert bench.uploaded()[1:] == [None], "its client may send it again"
    np.testing.assert_array_equal(bench.restored(), bench.whole)


def test_copies_of_another_size_are_of_no_use() -> None:
    bench = Bench(b=(0, 1), c=(0, 1))
    bench.nodes["b"].store.replicas.memory.hold(ARRAY, {bench.boxes[0]: np.zeros(3, np.uint8)})
    bench.restore((0, "b"), (0, "c"), (1, "c"))
    assert bench.uploaded() == [None]
    assert bench.world.counters["replicas_refused"] == 1


def test_no_room_for_what_is_fetched() -> None:
    bench = Bench(LARGE, b=(0, 1))
    bench.nodes["a"].bulk.full = True
    bench.restore((0, "b"), (1, "b"))
    (error,) = bench.uploaded()
    assert error is not None
    assert error.kind == "OutOfHostMemory"
    bench.check_idle()


@SIZES
@pytest.mark.parametrize("how", ["deleted", "client left", "restored again", "run again"])
def test_what_is_no_longer_wanted_is_no_longer_fetched(elements: int, how: str) -> None:
    for seed in range(10):
        bench = Bench(elements, seed, b=(0, 1))
        bench.restore((0, "b"), (1, "b"))
        bench.world.steps(bench.world.random.randrange(3))
        known = len(bench.world.to(CONTROL, msg.Uploaded))
        assert known == 0
        if how == "deleted":
            bench.a.drop(ARRAY)
        elif how == "client left":
            bench.a.drop_client(1)
        elif how == "restored again":
            bench.restore((0, "b"), (1, "b"))
        else:
            bench.a.arrays.expect(ARRAY, Value(), bench.spec, HERE)
        assert bench.a.census()["replicas_fetched"] == (how == "restored again")
        assert bench.uploaded() == [None] * (how == "restored again")
        bench.check_idle()


def test_what_was_to_be_restored_by_an_earlier_incarnation_leaves_nothing_in_this_one() -> None:
    bench = Bench(b=(0, 1))
    bench.a.uploads.place = ("", 0)  # it has not joined its island
    bench.restore((0, "b"), (1, "b"))
    assert not bench.uploaded()
    assert bench.a.value(ARRAY) is None


def test_an_array_that_is_restored_twice_is_told_once() -> None:
    bench = Bench(a=(0, 1))
    bench.restore()
    bench.restore()
    assert bench.uploaded() == [None]


def test_what_was_asked_of_a_host_that_is_lost_fails() -> None:
    bench = Bench(b=(0, 1))
    bench.restore((0, "b"), (1, "c"), (1, "b"))
    bench.world.kill("b")
    (error,) = bench.uploaded()
    assert error is not None
    assert error.kind == "HostLost"


def test_only_the_controller_restores_and_drops() -> None:
    bench = Bench(a=(0, 1))
    bench.say(msg.Restore(ARRAY, ARRAY, bench.spec, HERE, (), {}))
    bench.say(msg.DropReplicas((ARRAY,)))
    bench.world.settle()
    assert bench.world.counters["messages_refused"] == 2
    assert not bench.uploaded()
    bench.say(msg.DropReplicas((ARRAY, 99)), CONTROL)
    assert bench.a.census()["replica_bytes"] == 0


@pytest.mark.parametrize("early", [False, True], ids=["known host", "before the directory"])
@pytest.mark.parametrize(
    "permit",
    [
        b"",
        bytes(16),
        NO_SECRET.permit(ARRAY + 1, "a", "c"),
        NO_SECRET.permit(ARRAY, "a", "b"),
        NO_SECRET.permit(ARRAY, "b", "c"),
        NO_SECRET.permit(ARRAY, CONTROLLER, "c"),
    ],
    ids=["none", "guessed", "other array", "other host", "other holder", "the controller's"],
)
def test_a_host_gets_only_the_replicas_that_the_controller_permits(
    permit: bytes, early: bool
) -> None:
    bench = Bench(a=(0,))
    if early:
        bench.a.replicas.key = b""
    bench.ask(7, "c", bench.boxes[0], permit=permit)
    bench.hosts_are("a", "b", "c")
    bench.world.settle()
    (refused,) = bench.world.to(store_of("c"))
    assert isinstance(refused, msg.ReplicaRefused)
    assert refused.error.kind == "AccessRefused"
    bench.ask(8, "c", bench.boxes[0])
    (_, answer) = bench.world.to(store_of("c"))
    assert answer == msg.ReplicaData(8, bench.whole[: SMALL // 2].tobytes())


def test_a_host_may_be_asked_before_it_has_heard_of_its_cluster() -> None:
    """The controller's directory and the question come by different links."""
    bench = Bench(a=(0,))
    bench.a.replicas.early_kept = 2
    bench.a.replicas.key = b""
    for request, host in ((7, "new"), (8, "gone"), (9, "new")):
        bench.ask(request, host, bench.boxes[0])
    (refused,) = bench.world.to(store_of("new"))
    assert (type(refused), refused.request) == (msg.ReplicaRefused, 9)
    bench.say(msg.PeerLost("gone", "it has gone"))
    bench.hosts_are("a", "new")
    (_, answer) = bench.world.to(store_of("new"))
    assert answer == msg.ReplicaData(7, bench.whole[: SMALL // 2].tobytes())
    assert not bench.world.to(store_of("gone"))


def test_questions_that_cannot_be_answered_are_refused() -> None:
    bench = Bench(LARGE, a=(0,))
    (box, other), size = bench.boxes, LARGE * 4
    small = Landing(99, size - 1, 0, "b", "", "")
    gone = bench.nodes["c"].bulk.land(size, print)
    bench.world.kill("c")
    bench.ask(0, "b", box, dtype="int32")
    bench.ask(1, "b", box, other)
    bench.ask(2, "b", box)
    bench.ask(3, "b", box, landing=small)
    bench.ask(4, "b", box, landing=gone)
    bench.world.settle()
    refused = bench.world.to(store_of("b"), msg.ReplicaRefused)
    assert [message.request for message in refused] == [0, 1, 2, 3, 4]


def test_answers_that_nobody_asked_for_are_dropped() -> None:
    bench = Bench(b=(0, 1))
    bench.restore((0, "b"), (1, "b"))
    lie = np.zeros(SMALL).tobytes()
    for sender in (session_of("x"), store_of("c")):
        bench.say(msg.ReplicaData(1, lie), sender)
        bench.say(msg.ReplicaRefused(1, ErrorReport("ArrayLost", "no")), sender)
    assert bench.uploaded() == [None]
    np.testing.assert_array_equal(bench.restored(), bench.whole)
    bench.say(msg.ReplicaData(1, lie), store_of("b"))
    bench.say(msg.ReplicaRefused(1, ErrorReport("ArrayLost", "late")), store_of("b"))
    assert bench.uploaded() == [None]


def test_an_answer_of_the_wrong_size_is_no_answer() -> None:
    bench = Bench(b=(0, 1), c=(0, 1))
    bench.restore((0, "b"), (1, "b"), (0, "c"), (1, "c"))
    bench.say(msg.ReplicaData(1, b"short"), store_of("b"))
    assert bench.uploaded() == [None]
    np.testing.assert_array_equal(bench.restored(), bench.whole)


@SIZES
def test_what_is_offered_is_fetched_kept_and_told(elements: int) -> None:
    bench = Bench(elements, b=(0, 1))
    bench.offer((bench.boxes[1],), "b")
    bench.check_idle()
    assert bench.held("a") == [bench.boxes[1]]
    told = bench.world.to(CONTROL, msg.Holdings)
    assert told[1:] == [msg.Holdings((msg.Holding(ARRAY, (bench.boxes[1],), None, PROOF),))]
    assert bench.a.census()["replica_arrays"] == 1
    assert bench.a.census()["replica_bytes"] == elements * 4
    bench.offer(tuple(bench.boxes), "b")
    bench.check_idle()
    assert bench.held("a") == [bench.boxes[1], bench.boxes[0]]
    assert {one.proof for one in bench.a.save()} == {PROOF}, "the next incarnation shows it as well"
    bench.nodes["b"].store.replicas.memory.forget(lambda array: True)
    bench.restore()
    assert bench.uploaded() == [None]
    np.testing.assert_array_equal(bench.restored(), bench.whole)


def test_an_offer_that_comes_to_nothing_is_told_as_well() -> None:
    for seed in range(10):
        bench = Bench(LARGE, seed, b=(0,))
        bench.offer((bench.boxes[0],), "b")
        bench.world.steps(bench.world.random.randrange(2))
        bench.world.kill("b")
        bench.check_idle()
        (told,) = bench.world.to(CONTROL, msg.Holdings)[-1].holdings
        if told.boxes:
            assert told == msg.Holding(ARRAY, (bench.boxes[0],), None, PROOF)
        else:
            assert told.error is not None
            assert told.error.kind == "HostLost", "the array itself may be where it was"


def test_a_host_without_room_for_a_copy_says_so() -> None:
    bench = Bench(LARGE, b=(0,))
    bench.nodes["a"].bulk.full = True
    bench.offer((bench.boxes[0],), "b")
    bench.check_idle()
    (told,) = bench.world.to(CONTROL, msg.Holdings)[-1].holdings
    assert not told.boxes
    assert told.error is not None
    assert told.error.kind == "OutOfHostMemory"


@SIZES
@pytest.mark.parametrize("dropped", [False, True])
def test_offers_of_what_goes_are_forgotten(elements: int, dropped: bool) -> None:
    for seed in range(10):
        bench = Bench(elements, seed, a=(1,), b=(0,))
        bench.offer((bench.boxes[0],), "b")
        bench.world.steps(bench.world.random.randrange(6))
        if dropped:
            bench.say(msg.DropReplicas((ARRAY,)), CONTROL)
        else:
            bench.a.drop_client(1)
            bench.offer((bench.boxes[0],), "b")
        bench.check_idle()
        assert not any(bench.a.census().values())


def filled(spec: ArraySpec, whole: np.ndarray[Any, Any]) -> Value:
    value = Value()
    value.payload = dict(enumerate(np.split(whole, spec.sharding.device_count)))
    return value


def test_what_is_handed_over_is_what_is_ready_and_what_was_kept() -> None:
    bench = Bench(a=(0,))
    bench.a.arrays.expect(ARRAY, filled(bench.spec, bench.whole), bench.spec, HERE)
    other, failed, unmade = (client_id(1, serial) for serial in (6, 7, 8))
    bench.a.arrays.expect(other, filled(bench.spec, bench.whole + 1), bench.spec, HERE)
    bench.a.arrays.expect(failed, Value(ErrorReport("ComputationFailed", "")), bench.spec, HERE)
    bench.a.arrays.expect(unmade, Value(), bench.spec, HERE)
    for array in (ARRAY, other, failed, unmade):
        value = bench.a.value(array)
        assert value is not None
        bench.a.requests.submitted(array, value)
    saved = list(bench.a.save())
    assert sorted((one.array, one.box) for one in saved) == [
        (array, box) for array in (ARRAY, other) for box in bench.boxes
    ]
    again = Node(World(), "a", saved)
    assert sorted(again.store.save(), key=lambda s: s[:2])[2][:2] == (other, bench.boxes[0])
    by_box = {(one.array, one.box): one.data for one in again.store.replicas.memory.all()}
    for array, whole in ((ARRAY, bench.whole), (other, bench.whole + 1)):
        both = np.concatenate([by_box[array, box] for box in bench.boxes])
        np.testing.assert_array_equal(both.view(np.int64), whole)


def test_a_host_leaves_one_array_after_the_other() -> None:
    """They may be many gigabytes, copied from accelerators: the next is asked for when the last is written."""
    bench = Bench()
    for array in (ARRAY, client_id(1, 6)):
        value = filled(bench.spec, bench.whole)
        bench.a.arrays.expect(array, value, bench.spec, HERE)
        bench.a.requests.submitted(array, value)
    happened: list[str] = []
    backend: Any = bench.nodes["a"].backend
    snapshot = backend.snapshot

    def noted(*what: Any) -> Any:
        happened.append("snapshot")
        return snapshot(*what)

    backend.snapshot = noted
    for _ in bench.a.save():
        happened.append("taken")
    after_the_first = happened[happened.index("snapshot") + 1 :]
    assert "taken" in after_the_first[: after_the_first.index("snapshot")]


def test_a_new_incarnation_tells_what_it_was_given() -> None:
    bench = Bench(a=(0, 1), b=(1,))
    assert bench.world.to(CONTROL, msg.Holdings) == [
        msg.Holdings((msg.Holding(ARRAY, tuple(bench.boxes)),)),
        msg.Holdings((msg.Holding(ARRAY, (bench.boxes[1],)),)),
    ], "and one that was given nothing says nothing"


@pytest.mark.parametrize("dtype", ["int64", "float32", "bfloat16", "bool"])
@pytest.mark.parametrize("shape", [(), (0, 3), (6, 4)])
def test_bytes_of_every_kind_of_array(shape: tuple[int, ...], dtype: str) -> None:
    data = np.zeros(shape, dtype_of(dtype))
    assert flat_bytes(data).nbytes == data.nbytes
    assert flat_bytes(data.T).ndim == 1
