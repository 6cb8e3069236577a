"""Copies in host memory are kept where a crash does not reach them before anything relies on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from pw.core.errors import ErrorReport
from pw.core.ids import CONTROL, client_id, store_of
from pw.core.messages import DropReplicas, Holding, Holdings
from pw.core.sharding import Box
from pw.devices.host.replica_memory import KEEP_S, KEPT_WITHIN_S, LOOK_S, Replica, ReplicaMemory
from pw.devices.host.store import ObjectStore
from tests.stages.actors import Recorder, World
from tests.stages.fake_devices import FakeBackend, FakeBulk

BOX: Box = ((0, 8),)
A, B, C = (client_id(1, serial) for serial in (5, 6, 7))


class Bench:
    """One host's store, and a supervisor that takes what it is sent when it is told to."""

    def __init__(self, replicas: Sequence[Replica] = ()) -> None:
        self.world = world = World()
        self.controller: Recorder = world.add(CONTROL, Recorder)
        world.backends["a"] = FakeBackend(world, "a")
        self.store: ObjectStore = world.add(
            store_of("a"),
            lambda env: ObjectStore(
                env, world.backends["a"], FakeBulk(world, "a"), dict, replicas, keep=self.keep
            ),
        )
        self.memory: ReplicaMemory = self.store.replicas.memory
        self.sent: list[set[int]] = []
        """What the supervisor was sent, one time after the other."""
        self.kept: Callable[[ErrorReport | None], None] | None = None

    def keep(self, replicas: Sequence[Replica], kept: Callable[[ErrorReport | None], None]) -> None:
        assert self.kept is None, "one after the other"
        self.sent.append({one.array for one in replicas})
        self.kept = kept

    def take(self, error: ErrorReport | None = None) -> None:
        kept, self.kept = self.kept, None
        assert kept is not None
        kept(error)
        self.world.settle()

    def hold(self, *arrays: int) -> None:
        for array in arrays:
            self.memory.hold(array, {BOX: np.full(8, array % 251, np.uint8)})
        self.wait(KEEP_S)

    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)
        self.world.settle()

    def told(self) -> dict[int, str]:
        """What the controller has been told of each array: the kind of error, or that it is kept."""
        holdings = [h for message in self.controller.of(Holdings) for h in message.holdings]
        return {
            h.array: "kept" if h.boxes else h.error.kind for h in holdings if h.boxes or h.error
        }


def test_the_controller_hears_of_a_copy_when_the_supervisor_has_taken_it() -> None:
    bench = Bench()
    bench.hold(A)
    assert (bench.sent, bench.told()) == ([{A}], {})
    bench.wait(KEPT_WITHIN_S / 2)
    assert bench.told() == {}
    bench.take()
    assert bench.told() == {A: "kept"}
    bench.wait(2 * KEPT_WITHIN_S)
    assert (bench.sent, bench.told()) == ([{A}], {A: "kept"})


def test_what_arrives_meanwhile_is_kept_together_and_only_the_newest() -> None:
    bench = Bench()
    bench.hold(A)
    for array in (B, C):
        bench.hold(array)
    assert bench.sent == [{A}], "the supervisor has not taken it"
    bench.take()
    assert bench.told() == {A: "kept"}
    bench.wait(KEEP_S)
    assert bench.sent == [{A}, {A, B, C}]
    bench.take()
    assert bench.told() == dict.fromkeys((A, B, C), "kept")


def test_what_is_not_taken_in_time_counts_as_not_copied() -> None:
    bench = Bench()
    bench.hold(A)
    bench.wait(KEPT_WITHIN_S / 2)
    bench.hold(B)
    bench.wait(KEPT_WITHIN_S / 2 + LOOK_S)
    assert bench.told() == {A: "CheckpointFailed"}
    assert [one.array for one in bench.memory.all()] == [B], "its memory is free again"
    (holding,) = bench.controller.of(Holdings)[0].holdings
    assert "pw-worker" in holding.error.message
    bench.take()
    assert bench.told() == {A: "CheckpointFailed"}, "it is too late for that"
    bench.hold(A)
    bench.take()
    assert bench.told() == {A: "kept", B: "kept"}
    assert bench.sent[-1] == {A, B}


def test_what_there_is_no_room_for_counts_as_not_copied() -> None:
    bench = Bench()
    bench.hold(A)
    bench.take()
    bench.hold(B)
    bench.take(ErrorReport("CheckpointFailed", "no room", "a"))
    assert bench.told() == {A: "kept", B: "CheckpointFailed"}
    assert [one.array for one in bench.memory.all()] == [A], "what was kept before still is"


def test_what_was_kept_once_is_told_at_once() -> None:
    """A checkpoint of what has not changed since the last one waits for nothing."""
    bench = Bench([Replica(A, BOX, np.zeros(8, np.uint8))])
    bench.memory.announce()
    bench.world.settle()
    assert bench.told() == {A: "kept"}
    before = len(bench.controller.received)
    bench.hold(A)
    assert bench.sent == []
    assert bench.controller.received[before:] == [Holdings((Holding(A, (BOX,)),))]


def test_what_is_dropped_before_it_is_kept_is_never_told() -> None:
    bench = Bench()
    bench.hold(A, B)
    bench.world.post(CONTROL, store_of("a"), DropReplicas((A,)))
    bench.world.settle()
    bench.take()
    assert bench.told() == {B: "kept"}


def test_when_nothing_is_held_any_more_nothing_is_kept_and_that_is_said_once() -> None:
    bench = Bench()
    bench.hold(A)
    bench.memory.forget(lambda array: True)
    bench.take()
    bench.wait(KEEP_S)
    assert bench.sent == [{A}, set()]
    bench.take()
    bench.wait(5 * KEEP_S)
    assert bench.sent == [{A}, set()]


def test_a_host_that_leaves_tells_of_nothing_more() -> None:
    """The next incarnation does, which has been given all of it."""
    bench = Bench()
    bench.hold(A)
    assert [one.array for one in bench.memory.leave()] == [A]
    bench.take()
    bench.hold(B)
    bench.wait(2 * KEPT_WITHIN_S)
    assert (bench.sent, bench.told()) == ([{A}], {})


@pytest.mark.parametrize("others", [True, False])
def test_much_is_kept_only_where_no_other_host_has_it(others: bool) -> None:
    bench = Bench()
    bench.memory.kept_bytes = 10
    bench.store.replicas.hosts_are(frozenset({"a", "b"} if others else {"a"}))
    bench.hold(A, B)
    assert bench.sent == ([] if others else [{A, B}])
    if not others:
        bench.take()
    assert bench.told() == {A: "kept", B: "kept"}


def test_much_may_take_longer() -> None:
    bench = Bench()
    bench.memory.least_bytes_per_s = 1
    bench.hold(A, B)
    bench.wait(KEPT_WITHIN_S + LOOK_S)
    assert bench.told() == {}
    bench.wait(16 + LOOK_S)
    assert bench.told() == dict.fromkeys((A, B), "CheckpointFailed")
