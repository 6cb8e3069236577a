"""What a host takes under a launch lease: from whom, and what it keeps before the lease has come."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from pw.core import messages as msg
from pw.core.ids import client_id, session_of
from pw.devices.host.leases import EARLY_BYTES, KEPT, HostLease
from tests.devices.test_executor import SCHEDULER, Bench, X
from tests.stages.actors import TICKETS
from tests.stages.scripted import chain

HOLDER, OTHER = 1, 2
NODES = {HOLDER: "client-1", OTHER: "client-2", 3: "client-3"}


class LeaseBench(Bench):
    """A host that has a program of the holder and one of another client, and knows both clients."""

    def __init__(self) -> None:
        super().__init__()
        self.programs = {
            client: self.install(chain([self.here]), client=client) for client in (HOLDER, OTHER)
        }
        self.runs = 1000
        for client in (HOLDER, OTHER):
            self.identify(client)

    def identify(self, client: int) -> None:
        node = NODES[client]
        ticket = TICKETS.ticket(client, node)
        self.tell(msg.Identify(client, ticket, False), session_of(node), "store")

    def lend(
        self, lease: int = 1, client: int = HOLDER, first: int = 0, room_bytes: int = 0
    ) -> None:
        self.sequence += 1
        takes_bytes = 60 if room_bytes else 0
        program = msg.LentProgram(
            self.programs[client], 1, ((msg.LaunchStep(0, True),),), takes_bytes
        )
        node = NODES[client]
        lend = msg.Lend(1, self.sequence, lease, client, node, (program,), first, room_bytes)
        self.tell(lend)

    def widen(self, room_bytes: int) -> None:
        self.sequence += 1
        self.tell(msg.WidenLease(1, self.sequence, 1, room_bytes))

    def lease(self) -> HostLease:
        lease = self.host.executor.leases.current
        assert lease is not None
        return lease

    def of(self, client: int, index: int, lease: int = 1) -> msg.LeasedLaunch:
        """A launch that a client may send, if it has the lease."""
        self.runs += 1
        run, result = client_id(client, self.runs), client_id(client, 5000 + self.runs)
        steps, args = (msg.LaunchStep(0, True),), (X.tobytes(),)
        program = self.programs.get(client, 0)
        return msg.LeasedLaunch(1, lease, index, run, program, 1, steps, args, (result,))

    def send(self, launch: msg.LeasedLaunch, client: int = HOLDER) -> None:
        self.tell(launch, session_of(NODES[client]))

    def closed(self) -> list[msg.LeaseClosed]:
        """How the host has told of leases that it has closed."""
        return self.told(msg.LeaseClosed)

    def refused(self) -> int:
        return self.world.counters["leased_launches_refused"]

    def has_run(self, *launches: msg.LeasedLaunch) -> None:
        """Check that these launches were done."""
        self.settle()
        for launch in launches:
            np.testing.assert_array_equal(self.value(launch.results[0]), X + 1)

    def early(self) -> int:
        """The bytes of what is kept for leases that have not come."""
        kept = self.host.executor.leases.early_launches()
        return sum(len(arg) for launch in kept for arg in launch.args if isinstance(arg, bytes))


def test_launches_of_the_holder_are_taken_in_order_before_and_after_the_lease_has_come() -> None:
    bench = LeaseBench()
    launches = [bench.of(HOLDER, index) for index in range(4)]
    for launch in launches[:2]:
        bench.send(launch)
    assert bench.early()
    bench.lend()
    assert not bench.early()
    for launch in launches[2:]:
        bench.send(launch)
    bench.has_run(*launches)
    assert not bench.closed()


Change = Callable[[LeaseBench, msg.LeasedLaunch], msg.LeasedLaunch]
THEIRS = client_id(OTHER, 77)
WRONG: dict[str, Change] = {
    "a run of another client": lambda _, it: replace(it, run=THEIRS),
    "an array of another client": lambda _, it: replace(it, args=(THEIRS,)),
    "a result of another client": lambda _, it: replace(it, results=(THEIRS,)),
    "a program of another client": lambda bench, it: replace(it, program=bench.programs[OTHER]),
    "a program that is not there": lambda _, it: replace(it, program=client_id(HOLDER, 999)),
    "another installation": lambda _, it: replace(it, install=2),
    "no steps": lambda _, it: replace(it, steps=()),
    "a step that is not its host's": lambda _, it: replace(it, steps=(msg.LaunchStep(1, True),)),
    "an end that is not reported": lambda _, it: replace(it, steps=(msg.LaunchStep(0, False),)),
    "too many arguments": lambda _, it: replace(it, args=it.args * 2),
    "too few results": lambda _, it: replace(it, results=()),
    "a value of another size": lambda _, it: replace(it, args=(b"short",)),
    "a later launch": lambda _, it: replace(it, index=it.index + 1),
}


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("wrong", WRONG)
def test_the_holder_that_sends_what_may_not_be_loses_its_lease_and_the_scheduler_hears(
    wrong: str, is_early: bool
) -> None:
    bench = LeaseBench()
    good = bench.of(HOLDER, 0)
    bad = WRONG[wrong](bench, bench.of(HOLDER, 1))
    after = bench.of(HOLDER, 1)
    if not is_early:
        bench.lend()
    for launch in (good, bad, after):
        bench.send(launch)
    if is_early:
        bench.lend()
    bench.has_run(good)
    assert bench.closed() == [msg.LeaseClosed(1, 1, 1, ())]
    assert bench.host.store.value(after.results[0]) is None
    assert len(bench.host.backend.executed) == 1


@pytest.mark.parametrize("sender", [OTHER, 3])
@pytest.mark.parametrize("is_early", [False, True])
def test_the_launches_of_others_are_their_own_matter(sender: int, is_early: bool) -> None:
    """Another client that the host knows, and a stranger without a ticket."""
    bench = LeaseBench()
    theirs = [bench.of(sender, 0), bench.of(HOLDER, 0), bench.of(HOLDER, 7)]
    mine = [bench.of(HOLDER, index) for index in range(3)]
    if not is_early:
        bench.lend()
    for launch, forged in zip(mine, theirs, strict=True):
        bench.send(forged, sender)
        bench.send(launch)
    if is_early:
        bench.lend()
    bench.has_run(*mine)
    assert not bench.closed()
    assert len(bench.host.backend.executed) == len(mine)
    assert bench.refused() or is_early
    assert not bench.early()


def flood(bench: LeaseBench, client: int, lease: int, size_bytes: int) -> None:
    """Send many launches, of which each has a value of this size."""
    for index in range(4 * KEPT):
        launch = replace(bench.of(client, index, lease), args=(bytes(size_bytes),))
        bench.send(launch, client)


@pytest.mark.parametrize("size_bytes", [0, 1000, 1 << 16])
def test_what_a_client_sends_before_a_lease_takes_bounded_memory(size_bytes: int) -> None:
    bench = LeaseBench()
    flood(bench, 3, 1, size_bytes)
    assert not bench.early(), "the host does not know this client"
    flood(bench, OTHER, 1, size_bytes)
    for lease in (3, 2, 1 << 40):
        flood(bench, OTHER, lease, size_bytes)
    kept = bench.host.executor.leases.early_launches()
    assert len(kept) <= KEPT
    assert bench.early() <= EARLY_BYTES
    first = bench.of(HOLDER, 0)
    bench.send(first)
    bench.lend()
    bench.has_run(first)
    assert not bench.closed()
    bench.tell(msg.PeerLost(NODES[OTHER], "gone"))
    assert not bench.early()


@pytest.mark.parametrize("size_bytes", [X.nbytes, 1 << 16])
def test_the_scheduler_hears_of_launches_for_which_there_was_no_room(size_bytes: int) -> None:
    bench = LeaseBench()
    first = bench.of(HOLDER, 0)
    bench.send(first)
    for index in range(1, 2 * KEPT):
        bench.send(replace(bench.of(HOLDER, index), args=(bytes(size_bytes),)))
    bench.lend()
    bench.has_run(first)
    (closed, *_) = bench.closed()
    assert 1 <= closed.taken <= KEPT
    assert len(bench.host.backend.executed) == closed.taken


def test_a_lease_is_closed_with_the_link_to_its_holder_though_it_has_launched_nothing() -> None:
    bench = LeaseBench()
    bench.lend()
    bench.tell(msg.PeerLost(NODES[OTHER], "gone"))
    assert not bench.closed()
    bench.tell(msg.PeerLost(NODES[HOLDER], "gone"))
    assert bench.closed() == [msg.LeaseClosed(1, 1, 0, ())]


def test_the_scheduler_may_end_a_lease_that_has_not_come() -> None:
    bench = LeaseBench()
    launch = bench.of(HOLDER, 0)
    bench.send(launch)
    bench.tell(msg.CloseLease(1, 1, 0))
    assert not bench.closed()
    bench.lend()
    (closed,) = bench.closed()
    assert (closed.taken, [one.run for one in closed.launches]) == (1, [launch.run])
    bench.has_run(launch)
    assert bench.world.to(SCHEDULER, msg.LaunchGap) == []


def test_a_launch_waits_until_what_frees_its_memory_has_come() -> None:
    bench = LeaseBench()
    bench.lend(room_bytes=100)  # each launch takes 60
    launches = [bench.of(HOLDER, index) for index in range(3)]
    for launch in launches:
        bench.send(launch)
    bench.has_run(launches[0])
    assert bench.lease().next_index == 1
    bench.widen(180)
    bench.has_run(*launches)
    assert not bench.closed()


def test_launches_that_wait_for_memory_are_not_taken_when_the_lease_is_over() -> None:
    bench = LeaseBench()
    bench.lend(room_bytes=100)
    launches = [bench.of(HOLDER, index) for index in range(2)]
    for launch in launches:
        bench.send(launch)
    bench.tell(msg.CloseLease(1, 1, 0))
    (closed,) = bench.closed()
    assert closed.taken == 1
    assert bench.world.to(session_of(NODES[HOLDER]), msg.LeaseOver) == [msg.LeaseOver(1)]
    bench.widen(180)
    assert bench.lease().next_index == 1
