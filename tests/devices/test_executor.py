"""One host's executor: launches strictly in order, whatever comes when, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from pw.core import messages as msg
from pw.core.compact import Compact
from pw.core.errors import ErrorReport, HostLost
from pw.core.ids import (
    CONTROL,
    RESOURCES,
    Address,
    client_id,
    client_of,
    coordinator_of,
    executor_of,
    scheduler_of,
    store_of,
)
from pw.core.packing import pack
from pw.core.programs.lower import lower
from pw.core.programs.plan import Execute
from pw.core.programs.program import Computation, Node, Output, Program, ValueRef
from pw.core.sharding import Binding, DeviceAddress, Placement
from pw.devices.host import backend as ops
from pw.devices.host.launch_end import PROGRESS_SHARE
from pw.devices.host.replica_memory import KEEP_S, Replica
from tests.stages.actors import TICKETS, FakeHost, World
from tests.stages.scripted import SMALL, chain, copy, digest, split

X = np.arange(SMALL)
SCHEDULER = scheduler_of("a")


class Bench:
    """Host "a0" in epoch 1, and programs over it and hosts that the test plays."""

    def __init__(self, *peers: str, replicas: Sequence[Replica] = ()) -> None:
        self.world = World()
        registration = msg.RegisterHost("a", 1 + len(peers), 1, "cpu", "", 1)
        self.host = FakeHost(self.world, "a0", registration, replicas)
        self.tell(msg.FormIsland("a", 1, ("a0", *peers), 0, "", TICKETS.public))
        self.sequence = -1
        self.installs: list[int] = []
        """The numbers of the programs that were installed."""
        self.serial = 0
        self.slices = {
            number: Binding.of(number, name[0], (DeviceAddress(name, 0),))
            for number, name in ((1, "a0"), (2, "b0"), (3, "c0"))
        }
        gang = tuple(DeviceAddress(name, 0) for name in ("a0", "a1"))
        self.slices[4] = Binding.of(4, "a", gang)
        self.wide = split(4, 2)
        self.here, self.there, self.third = (split(number, 1) for number in (1, 2, 3))

    def tell(self, message: object, sender: Address = SCHEDULER, actor: str = "executor") -> None:
        self.world.mailboxes["a0"].append((sender, Address("a0", actor), message))
        self.world.drain("a0")

    def install(
        self,
        body: Program,
        blob: bytes = b"1",
        epoch: int = 1,
        again: int = 0,
        install: int = 1,
        client: int = 1,
    ) -> int:
        self.serial += not again
        number = again or client_id(client, self.serial)
        plan = lower(body, self.slices)
        (mine,) = [host_plan for host_plan in plan.hosts if host_plan.host == "a0"]
        self.segments = [part.segment for part in mine.segments]
        artifacts = (msg.Artifact(digest(blob), blob),)
        self.sequence += epoch == 1
        self.installs.append(self.sequence)
        whole = Compact.of(body), Compact.of(mine), artifacts
        self.tell(msg.Install(epoch, self.sequence, number, *whole, install))
        return number

    def launch(self, program: int, *args: Any, segment: int = 0, **how: Any) -> tuple[int, int]:
        """A run's first launch; its number and that of its only result."""
        self.sequence += 1
        self.serial += 2
        client = client_of(program)
        made = client_id(client, self.serial - 1)
        run, result = client_id(client, self.serial), how.get("result", made)
        arguments = msg.Arguments(args, how.get("results", (result,)))
        self.tell(
            msg.Launch(
                how.get("epoch", 1),
                how.get("sequence", self.sequence),
                run,
                program,
                segment,
                arguments,
                True,
            )
        )
        return run, result

    def replicate(self, *arrays: int) -> None:
        self.sequence += 1
        at = (DeviceAddress("a0", 0),)
        copies = tuple(msg.ArrayCopy(array, self.here, at, (0,)) for array in arrays)
        self.tell(msg.Replicate(1, self.sequence, copies))

    def cancel(self, run: int, program: int) -> None:
        self.sequence += 1
        self.tell(msg.Launch(1, self.sequence, run, program, msg.CANCELLED, None, False))

    def lose(self, *nodes: str) -> None:
        """Tell the coordinator that these hosts have gone."""
        for node in nodes:
            self.tell(msg.PeerLost(node, "silent"), actor="coordinator")

    def place(self, sequence: int) -> int:
        """The place of an order among those that install nothing."""
        return sequence - sum(number < sequence for number in self.installs)

    def finished(self) -> dict[int, bool]:
        """The launches that have ended, and whether they are lost."""
        self.settle()
        return {
            self.place(f.sequence): f.lost is not None
            for progress in self.told(msg.Progress)
            for f in progress.finished
        }

    def edge(self, run: int, source: str, values: Any, edge: int = 0) -> None:
        message = msg.EdgeData(run, edge, pack([values]))
        self.tell(message, coordinator_of(source), "coordinator")

    def settle(self) -> None:
        self.world.settle()

    def value(self, array: int) -> Any:
        """What the store holds for an array."""
        found = self.host.store.value(array)
        assert found is not None
        return found.error if found.error is not None else found.payload[0]

    def copies(self) -> dict[int, Any]:
        """What the host holds in host memory."""
        saved = self.host.store.replicas.memory.all()
        return {one.array: one.data.view(np.int64) for one in saved}

    def told(self, kind: type) -> list[Any]:
        return self.world.to(SCHEDULER, kind)


def test_a_gap_stops_the_host_and_is_reported_once() -> None:
    bench = Bench()
    program = bench.install(chain([bench.here]))
    bench.launch(program, X.tobytes())
    bench.launch(program, X.tobytes(), sequence=3)
    bench.launch(program, X.tobytes(), sequence=2)
    bench.settle()
    assert bench.told(msg.LaunchGap) == [msg.LaunchGap(1, 2, 3)]
    assert len(bench.host.backend.executed) == 1


def test_a_launch_of_what_it_does_not_know_stops_the_host() -> None:
    bench = Bench()
    program = bench.install(chain([bench.here]))
    bench.tell(msg.Launch(1, 1, client_id(1, 99), program, 0, None, True))
    bench.launch(program, X.tobytes(), sequence=2)
    bench.settle()
    assert len(bench.told(msg.LaunchGap)) == 1
    assert not bench.host.backend.executed


def test_what_another_epoch_sends_is_dropped() -> None:
    bench = Bench()
    bench.install(chain([bench.here]), epoch=2)
    bench.settle()
    assert not bench.told(msg.Installed)
    assert not any(bench.host.census().values())
    program = bench.install(chain([bench.here]))
    bench.launch(program, X.tobytes(), epoch=2, sequence=1)
    bench.launch(program, X.tobytes(), epoch=1, sequence=1)
    bench.settle()
    assert not bench.told(msg.LaunchGap)
    assert [progress.epoch for progress in bench.told(msg.Progress)] == [1]


def test_the_scheduler_is_told_what_each_computation_takes_besides_its_arrays() -> None:
    bench = Bench()
    backend: Any = bench.host.backend
    install = backend.install

    def installed(key: bytes, computation: Computation, *rest: Any) -> None:
        *what, done = rest
        sizes = {"stage 1": 70, "stage 3": 50}
        install(key, computation, *what, lambda error: done(error or sizes.get(computation.name)))

    backend.install = installed
    bench.install(chain([bench.there, bench.here, bench.here, bench.here]))
    bench.settle()
    (told,) = bench.told(msg.Installed)
    assert (told.error, told.temporary_bytes) == (None, (0, 70, 0, 50))


def test_everything_waits_behind_an_edge_and_goes_on_in_order() -> None:
    bench = Bench()
    waiting = bench.install(chain([bench.there, bench.here]))
    (segment,) = bench.segments
    alone = bench.install(chain([bench.here], b"5"), b"5")
    run, late = bench.launch(waiting, X.tobytes(), segment=segment)
    _, ready = bench.launch(alone, X.tobytes())
    bench.settle()
    assert not bench.host.backend.executed
    bench.edge(run, "b0", X + 1)
    bench.settle()
    np.testing.assert_array_equal(bench.value(late), X + 2)
    np.testing.assert_array_equal(bench.value(ready), X + 5)
    assert [key.split(b"/")[0] for key in bench.host.backend.executed] == [
        str(program).encode() for program in (waiting, alone)
    ]


def test_who_waits_for_an_edge_holds_up_no_other_client() -> None:
    bench = Bench()
    waiting = bench.install(chain([bench.there, bench.here]))
    (segment,) = bench.segments
    alone = bench.install(chain([bench.here], b"5"), b"5")
    theirs = bench.install(chain([bench.here], b"7"), b"7", client=2)
    run, late = bench.launch(waiting, X.tobytes(), segment=segment)
    bench.launch(alone, X.tobytes())
    _, first = bench.launch(theirs, X.tobytes())
    _, second = bench.launch(theirs, first)
    bench.sequence += 1
    bench.tell(msg.Discard(1, bench.sequence, (first,), (theirs,), ()))
    bench.settle()
    np.testing.assert_array_equal(bench.value(second), X + 14)
    installed = {int(key.split(b"/")[0]) for key in bench.host.backend.installed}
    assert installed == {waiting, alone}
    assert len(bench.host.backend.executed) == 2
    assert bench.finished().keys() == {2, 3}
    (held,) = bench.told(msg.PassedLaunches)
    assert [client_of(run_) for run_, _ in held.passed] == [1, 1]
    assert held.passed[0] == (run, segment)
    bench.edge(run, "b0", X + 1)
    assert bench.finished().keys() == {0, 1, 2, 3}
    np.testing.assert_array_equal(bench.value(late), X + 2)
    (_, again) = bench.told(msg.PassedLaunches)
    assert again == msg.PassedLaunches(1, (), held.passed)


def test_a_gang_goes_after_all_that_came_before_it() -> None:
    bench = Bench("a1")
    moves = bench.install(chain([bench.there, bench.here]))
    (alone,) = bench.segments
    gang = bench.install(chain([bench.there, bench.wide]))
    (segment,) = bench.segments
    theirs = bench.install(chain([bench.wide]), client=2)
    third = bench.install(chain([bench.here]), client=3)
    queue = bench.host.backend.queue

    def handed_over() -> list[int]:
        return [int(op.key.split(b"/")[0]) for op in queue if isinstance(op, ops.Execute)]

    mine, _ = bench.launch(moves, b"", segment=alone)
    bench.launch(theirs, X.tobytes())
    bench.launch(third, X.tobytes())
    assert handed_over() == [third], "another host may need what is first to come to the gang"
    bench.edge(mine, "b0", X)
    assert handed_over() == [third, moves, theirs]
    run, _ = bench.launch(gang, b"", segment=segment)
    bench.launch(theirs, X.tobytes())
    bench.launch(third, X.tobytes())
    assert handed_over()[3:] == [third]
    bench.edge(run, "b0", X[: SMALL // 2], edge=0)
    bench.settle()
    assert handed_over() == [theirs, third, gang, theirs], "the first waits for another host"


def test_a_later_run_may_read_what_has_not_arrived() -> None:
    """As an argument, to send it on, to lay it out differently, and to pass it through."""
    bench = Bench()
    moved = bench.install(copy(bench.there, bench.here))
    (segment,) = bench.segments
    computed = bench.install(chain([bench.here]))
    sent = bench.install(chain([bench.here, bench.there]))
    passed = bench.install(copy(bench.here, bench.here))
    run, y = bench.launch(moved, X.tobytes(), segment=segment)
    _, through = bench.launch(passed, y)
    _, after = bench.launch(computed, through)
    bench.launch(sent, y)
    bench.settle()
    assert not bench.host.backend.executed
    assert not bench.host.store.arrays[through].submitted
    bench.edge(run, "b0", X)
    bench.settle()
    np.testing.assert_array_equal(bench.value(through), X)
    np.testing.assert_array_equal(bench.value(after), X + 1)
    (data,) = bench.world.to(coordinator_of("b0"), msg.EdgeData)
    np.testing.assert_array_equal(np.frombuffer(data.data, np.int64), X + 1)
    assert bench.host.store.arrays[through].submitted


def test_what_came_in_a_message_is_used_without_another_turn() -> None:
    """A stage of a pipeline is one batch of ops; large values are assembled first."""
    bench = Bench()
    stage = bench.install(chain([bench.there, bench.here, bench.there]))
    (segment,) = bench.segments
    run, _ = bench.launch(stage, X.tobytes(), segment=segment)
    bench.settle()
    submitted: list[list[type[ops.Op]]] = []
    submit = bench.host.backend.submit

    def spied(batch: list[ops.Op]) -> None:
        submitted.append([type(op) for op in batch])
        submit(batch)

    bench.host.backend.submit = spied  # type: ignore[method-assign, assignment]
    bench.edge(run, "b0", X)
    bench.settle()
    assert submitted[0] == [ops.Build, ops.Execute, ops.Read, ops.Watch]


def two_sources(bench: Bench) -> Program:
    """A sum of one input from each of two other islands."""
    specs = (bench.here, bench.here)
    add = Computation("add", digest(b"1"), bench.here.placement, specs, (bench.here,))
    return Program(
        "sum",
        (add,),
        (Node(0, (ValueRef(-1, 0), ValueRef(-1, 1))),),
        (bench.there, bench.third),
        (Output(ValueRef(0, 0), bench.here),),
    )


def test_an_edge_that_failed_before_its_launch_does_not_start_the_launch_early() -> None:
    for order in (("b0", "c0"), ("c0", "b0")):
        bench = Bench()
        program = bench.install(two_sources(bench))
        (segment,) = bench.segments
        run = client_id(1, bench.serial + 2)
        edges = {"b0": 0, "c0": 1}
        failed = msg.EdgeFailed(run, edges[order[0]], ErrorReport("ComputationFailed", "there"))
        bench.tell(failed, coordinator_of(order[0]), "coordinator")
        launched, result = bench.launch(program, b"", b"", segment=segment)
        assert launched == run
        bench.settle()
        assert not bench.host.backend.executed, "the other edge is still on its way"
        bench.edge(run, order[1], X, edges[order[1]])
        bench.settle()
        assert bench.value(result).message == "there"


def test_what_comes_from_a_host_that_has_gone_fails_at_once() -> None:
    """Also when the launch comes after the loss, and when there never was a link to that host."""
    bench = Bench()
    program = bench.install(chain([bench.there, bench.here]))
    (segment,) = bench.segments
    bench.tell(msg.Directory((msg.Peer("a0", ""), msg.Peer("b0", ""))))
    _, before = bench.launch(program, b"", segment=segment)
    bench.tell(msg.Directory((msg.Peer("a0", ""),)))
    _, after = bench.launch(program, b"", segment=segment)
    bench.settle()
    assert [bench.value(array).kind for array in (before, after)] == [HostLost.__name__] * 2
    bench.tell(msg.Directory((msg.Peer("a0", ""), msg.Peer("b0", ""))))
    run, again = bench.launch(program, b"", segment=segment)
    bench.edge(run, "b0", X + 1)
    bench.settle()
    np.testing.assert_array_equal(bench.value(again), X + 2)
    bench.launch(program, b"", segment=segment)
    bench.tell(msg.PeerLost("b0", "silent"), actor="coordinator")
    bench.settle()
    assert len(bench.told(msg.Progress)) >= 1
    assert not bench.host.executor.census()["queue"]


def test_discards_take_their_place_behind_launches() -> None:
    bench = Bench()
    waiting = bench.install(chain([bench.there, bench.here]))
    (segment,) = bench.segments
    alone = bench.install(chain([bench.here]))
    _, x = bench.launch(alone, X.tobytes())
    run, _ = bench.launch(waiting, b"", segment=segment)
    _, y = bench.launch(alone, x)
    bench.sequence += 1
    bench.tell(msg.Discard(1, bench.sequence, (x,), (alone,), ()))
    bench.settle()
    assert f"{alone}/1/0".encode() in bench.host.backend.installed
    bench.edge(run, "b0", X)
    bench.settle()
    np.testing.assert_array_equal(bench.value(y), X + 2)
    assert f"{alone}/1/0".encode() not in bench.host.backend.installed
    bench.sequence += 1
    bench.tell(msg.Discard(1, bench.sequence, (), (), (1,)))
    bench.settle()
    assert not any(bench.host.census().values())


def test_a_run_that_is_cut_short_poisons_what_it_has_not_made() -> None:
    bench = Bench()
    program = bench.install(chain([bench.here, bench.there, bench.here]))
    first, _ = bench.segments
    run, result = bench.launch(program, X.tobytes(), segment=first, last=False)
    bench.cancel(run, program)
    alone = bench.install(chain([bench.here]))
    _, after = bench.launch(alone, result)
    bench.settle()
    assert bench.value(result).kind == "HostLost"
    assert bench.value(after) == bench.value(result)
    assert bench.host.census()["runs"] == 0


def test_progress_is_sent_once_a_turn() -> None:
    bench = Bench()
    program = bench.install(chain([bench.here]))
    for _ in range(5):
        bench.launch(program, X.tobytes())
    while bench.host.backend.queue:
        bench.host.backend.step()
    for happening in list(bench.world.happenings["a0"]):
        happening()
    bench.world.drain("a0")
    (progress,) = bench.told(msg.Progress)
    assert [bench.place(one.sequence) for one in progress.finished] == list(range(5))


def test_progress_waits_for_more_while_enough_is_under_way_but_not_for_long() -> None:
    bench = Bench()
    program = bench.install(chain([bench.here]))
    bench.settle()
    for _ in range(3 * PROGRESS_SHARE):
        bench.launch(program, X.tobytes())

    def end_one() -> int:
        """How many launches the scheduler has heard of when another one has ended."""
        while bench.host.backend.queue and not bench.world.happenings["a0"]:
            bench.host.backend.step()
        bench.world.happenings["a0"].popleft()()
        bench.world.drain("a0")
        return sum(len(progress.finished) for progress in bench.told(msg.Progress))

    assert [end_one() for _ in range(4)] == [0, 0, 3, 3]
    alarm = bench.world.alarms[-1]
    bench.tell(alarm.note, alarm.address)
    assert len(bench.told(msg.Progress)[-1].finished) == 1
    assert len(bench.finished()) == 3 * PROGRESS_SHARE


def test_a_device_is_charged_in_its_order_though_the_news_comes_in_another() -> None:
    bench = Bench()
    program = bench.install(chain([bench.here]))
    other = bench.install(chain([bench.here]), client=2)
    bench.settle()
    for each in (program, other, program):
        bench.launch(each, X.tobytes())
    while bench.host.backend.queue:
        bench.host.backend.step()
    happenings = bench.world.happenings["a0"]
    first, second, third = happenings
    happenings.clear()
    for took_s, done in ((0.028, second), (0.001, first), (0.002, third)):
        bench.world.now_s += took_s
        done()
    bench.world.drain("a0")
    (progress,) = bench.told(msg.Progress)
    charged = {bench.place(one.sequence): one.device_time_us for one in progress.finished}
    assert [round(charged[place], -2) for place in range(3)] == [29_000, 0, 2_000]


def test_a_program_installed_again_is_not_forgotten_with_what_it_was_before() -> None:
    bench = Bench()
    waiting = bench.install(chain([bench.there, bench.here]))
    (segment,) = bench.segments
    body = chain([bench.here])
    program = bench.install(body)
    run, _ = bench.launch(waiting, b"", segment=segment)
    bench.sequence += 1
    bench.tell(msg.Discard(1, bench.sequence, (), (program,), ()))
    bench.install(body, again=program, install=2)
    bench.settle()
    assert [installed.install for installed in bench.told(msg.Installed)] == [1, 1, 2]
    bench.edge(run, "b0", X)
    bench.settle()
    installed = bench.host.backend.installed
    assert f"{program}/1/0".encode() not in installed, "the discard had its turn"
    _, y = bench.launch(program, X.tobytes())
    bench.settle()
    np.testing.assert_array_equal(bench.value(y), X + 1)
    bench.install(body, again=program, install=3)
    _, z = bench.launch(program, y)
    bench.settle()
    np.testing.assert_array_equal(bench.value(z), X + 2)
    bench.sequence += 1
    bench.tell(msg.Discard(1, bench.sequence, (), (program,), ()))
    bench.settle()
    assert not [key for key in installed if key.startswith(f"{program}/".encode())]


def test_an_artifact_that_did_not_come_is_a_compile_error() -> None:
    bench = Bench()
    bench.install(chain([bench.here]), b"2")
    bench.settle()
    (installed,) = bench.told(msg.Installed)
    assert installed.error.kind == "CompileError"
    assert "has not reached this host" in installed.error.message


def test_the_sender_of_a_credit_is_answered_whatever_has_become_of_the_edge() -> None:
    assert executor_of("a0") == Address("a0", "executor")
    bench = Bench()
    landing = bench.host.bulk.land(10, lambda buffer: None)
    bench.sequence += 1
    bench.tell(msg.Discard(1, bench.sequence, (), (), (1,)))
    credit = msg.EdgeCredit(client_id(1, 1), 0, landing)
    bench.tell(credit, coordinator_of("b0"), "coordinator")
    (failed,) = bench.world.to(coordinator_of("b0"), msg.EdgeFailed)
    assert failed.error.kind == "Disconnected"
    assert not [op for op in bench.host.backend.queue if isinstance(op, ops.Execute)]


def test_who_asks_for_an_edge_of_a_client_that_has_gone_is_answered_once_it_was_sent() -> None:
    bench = Bench()
    program = bench.install(chain([bench.third, bench.here, bench.there]))
    (segment,) = bench.segments
    run, _ = bench.launch(program, b"", segment=segment)
    bench.sequence += 1
    bench.tell(msg.Discard(1, bench.sequence, (), (), (1,)))
    b = coordinator_of("b0")
    bench.tell(msg.EdgeProbe(run, 1), b, "coordinator")
    assert not bench.world.to(b)
    bench.edge(run, "c0", X)
    bench.settle()
    (sent,) = bench.world.to(b)
    assert isinstance(sent, msg.EdgeData)
    assert sent.edge == 1
    bench.tell(msg.EdgeProbe(run, 1), b, "coordinator")
    assert bench.world.to(b, msg.EdgeGone) == [msg.EdgeGone(run, 1)]
    assert not any(bench.host.census().values())


# --- what a lost host does to others ------------------------------------------------------------------


def test_what_was_lost_on_the_way_never_gets_into_a_gang_of_several_hosts() -> None:
    """The other host may have its half of the edge, and wait in the collective already."""
    bench = Bench("a1")
    gang = bench.install(chain([bench.there, bench.wide]))
    (segment,) = bench.segments
    alone = bench.install(chain([bench.here]))
    _, before = bench.launch(alone, X.tobytes())
    bench.launch(gang, b"", segment=segment)
    _, behind = bench.launch(alone, X.tobytes())
    bench.lose("b0")
    bench.settle()
    (broken,) = bench.told(msg.GangBroken)
    assert broken.epoch == 1
    assert "host b0 was lost" in broken.reason
    np.testing.assert_array_equal(bench.value(before), X + 1)
    assert bench.host.store.value(behind).payload is None
    bench.launch(alone, X.tobytes())
    bench.settle()
    assert len(bench.host.backend.executed) == 1
    assert not bench.host.backend.queue, "no collective waits"
    assert len(bench.told(msg.GangBroken)) == 1


def test_what_was_made_of_something_lost_does_not_get_into_a_gang_either() -> None:
    bench = Bench("a1")
    arriving = bench.install(chain([bench.there, bench.here]))
    (segment,) = bench.segments
    local = bench.install(copy(bench.here, bench.here))
    alone = bench.install(chain([bench.here]))
    spread = bench.install(chain([bench.wide]))
    _, first = bench.launch(arriving, b"", segment=segment)
    _, second = bench.launch(alone, first)
    _, third = bench.launch(local, second)
    value = bench.host.store.value(third)
    wide = client_id(1, 500)
    bench.host.store.arrays.expect(wide, value, bench.wide, (DeviceAddress("a0", 0),))
    bench.lose("b0")
    bench.launch(spread, wide)
    (broken,) = bench.told(msg.GangBroken)
    assert "an input of 'chain' was lost on host a0" in broken.reason
    assert bench.finished() == {0: True, 1: True, 2: True}


def test_an_error_of_the_program_goes_through_gangs_like_a_value() -> None:
    bench = Bench("a1")
    gang = bench.install(chain([bench.there, bench.wide]))
    (segment,) = bench.segments
    run, _ = bench.launch(gang, b"", segment=segment)
    failed = msg.EdgeFailed(run, 0, ErrorReport("ComputationFailed", "there"))
    bench.tell(failed, coordinator_of("b0"), "coordinator")
    assert not bench.told(msg.GangBroken)
    (head,) = [op for op in bench.host.backend.queue if isinstance(op, ops.Execute)]
    assert head.args[0].error == failed.error


def test_only_what_no_later_computation_of_the_gang_reads_is_guarded() -> None:
    """A failure goes through those that read, so that the last ones show it."""
    bench = Bench("a1")
    body = chain([bench.wide] * 3)
    aside = Node(0, (ValueRef(0, 0),))
    bench.install(replace(body, nodes=(*body.nodes, aside)))
    (program,) = bench.host.executor.programs.values()
    (segment,) = program.segments.values()
    executed = [i for i in segment.instructions if isinstance(i, Execute)]
    unread = [segment.instructions[position] for position in sorted(segment.unread)]
    assert unread == executed[2:]


def test_a_gang_of_one_host_poisons_and_says_what_is_lost() -> None:
    bench = Bench()
    arriving = bench.install(chain([bench.there, bench.here]))
    (segment,) = bench.segments
    alone = bench.install(chain([bench.here]))
    moved = bench.install(copy(bench.there, bench.here))
    (moving,) = bench.segments
    _, lost = bench.launch(arriving, b"", segment=segment)
    _, after = bench.launch(alone, lost)
    _, apart = bench.launch(alone, X.tobytes())
    _, copied = bench.launch(moved, b"", segment=moving)
    assert bench.finished() == {}
    bench.lose("b0")
    assert bench.finished() == {0: True, 1: True, 2: False, 3: True}
    assert [bench.value(array).kind for array in (lost, after, copied)] == ["HostLost"] * 3
    np.testing.assert_array_equal(bench.value(apart), X + 1)
    raised = bench.install(chain([bench.here], b"raise"), b"raise")
    bench.launch(raised, X.tobytes())
    assert bench.finished()[4] is False
    assert not bench.told(msg.GangBroken)


def test_a_launch_that_only_receives_ends_when_all_has_come() -> None:
    """Until then the run is under way, and is run again if its producer is lost."""
    bench = Bench()
    moved = bench.install(copy(bench.there, bench.here))
    (segment,) = bench.segments
    run, result = bench.launch(moved, b"", segment=segment)
    assert bench.finished() == {}
    bench.edge(run, "b0", X)
    assert bench.finished() == {0: False}
    np.testing.assert_array_equal(bench.value(result), X)


def test_a_launch_has_ended_when_the_last_computation_on_each_device_has() -> None:
    bench = Bench()
    bench.slices[5] = Binding.of(5, "a", tuple(DeviceAddress("a0", ordinal) for ordinal in (0, 1)))
    one, other = (replace(bench.here, placement=Placement(5, (at,))) for at in (0, 1))
    body = chain([one, one])
    aside = Computation("aside", digest(b"1"), other.placement, (other,), (other,))
    program = bench.install(
        replace(
            body,
            computations=(*body.computations, aside),
            nodes=(body.nodes[0], Node(2, (ValueRef(-1, 1),)), Node(1, (ValueRef(0, 0),))),
            inputs=(one, other),
            outputs=(Output(ValueRef(2, 0), one), Output(ValueRef(1, 0), other)),
        )
    )
    how = {"results": (client_id(1, 800), client_id(1, 801))}
    run, _ = bench.launch(program, X.tobytes(), X.tobytes(), **how)
    queue = bench.host.backend.queue
    made = [op.results[-1] for op in queue if isinstance(op, ops.Execute)]
    watches = [op for op in queue if isinstance(op, ops.Watch)]
    assert [op.values for op in watches] == [(made[1],), (made[2],)]
    kinds = [type(op).__name__ for op in queue if isinstance(op, ops.Execute | ops.Watch)]
    assert kinds == ["Execute", "Execute", "Watch", "Execute", "Watch"], (
        "held until it is ready only"
    )
    work = frozenset({(run, 0)})
    made[2].payload = [X]
    assert bench.host.executor.explanations.describe(1, work).launches[-1].state != "finished"
    made[2].payload = None
    assert bench.finished() == {0: False}
    assert bench.host.executor.explanations.describe(1, work).launches[-1].state == "finished"


def test_slices_that_share_a_device_end_with_the_last_computation_there() -> None:
    bench = Bench()
    at = DeviceAddress("a0", 0)
    bench.slices[5], bench.slices[6] = Binding.of(5, "a", (at,)), Binding.of(6, "a", (at,))
    both = [replace(bench.here, placement=Placement(number, (0,))) for number in (5, 6, 5, 6)]
    program = bench.install(chain(both))
    bench.launch(program, X.tobytes())
    assert sum(isinstance(op, ops.Watch) for op in bench.host.backend.queue) == 1
    assert bench.finished() == {0: False}


def test_what_ends_on_another_device_takes_nothing_from_the_time_of_a_launch() -> None:
    bench = Bench()
    bench.slices[5] = Binding.of(5, "a", tuple(DeviceAddress("a0", ordinal) for ordinal in (0, 1)))
    one, other = (replace(bench.here, placement=Placement(5, (at,))) for at in (0, 1))
    long, short = bench.install(chain([one])), bench.install(chain([other]))
    bench.settle()
    bench.launch(long, X.tobytes())
    for _ in range(5):
        bench.launch(short, X.tobytes())
    queue = bench.host.backend.queue
    first, *others = [op.done for op in queue if isinstance(op, ops.Watch)]
    queue.clear()
    for done in others:
        bench.world.wait(0.1)
        done(None)
    bench.world.wait(0.1)
    first(None)
    bench.settle()
    bench.world.wait(1)
    reports = [one for progress in bench.told(msg.Progress) for one in progress.finished]
    times_us = {bench.place(one.sequence): one.device_time_us for one in reports}
    assert times_us.pop(0) == pytest.approx(600_000, rel=0.01)
    assert sum(times_us.values()) == pytest.approx(500_000, rel=0.01)


def test_what_a_cancelled_run_has_not_made_is_lost_on_all_hosts_alike() -> None:
    bench = Bench("a1")
    program = bench.install(chain([bench.here, bench.there, bench.wide]))
    first, _ = bench.segments
    spread = bench.install(chain([bench.wide]))
    run, result = bench.launch(program, X.tobytes(), segment=first, last=False)
    bench.launch(spread, result)
    bench.cancel(run, program)
    bench.launch(spread, result)
    assert bench.value(result).kind == "HostLost"
    assert not bench.told(msg.GangBroken)


def test_what_a_cancelled_run_has_made_stays() -> None:
    bench = Bench()
    body = chain([bench.here, bench.there, bench.here])
    early = Output(ValueRef(0, 0), bench.here)
    given = Output(ValueRef(-1, 0), bench.here)
    program = bench.install(replace(body, outputs=(*body.outputs, early, given)))
    first, _ = bench.segments
    late, made, passed = (client_id(1, serial) for serial in (600, 601, 602))
    how = {"results": (late, made, passed), "segment": first, "last": False}
    run, _ = bench.launch(program, X.tobytes(), **how)
    bench.cancel(run, program)
    bench.settle()
    assert bench.value(late).kind == "HostLost"
    np.testing.assert_array_equal(bench.value(made), X + 1)
    np.testing.assert_array_equal(bench.value(passed), X)
    assert all(bench.host.store.arrays[array].submitted for array in (late, made, passed))


@pytest.mark.parametrize("launched", [0, 1, 2])
def test_who_sends_to_what_will_not_be_launched_is_told(launched: int) -> None:
    """Also of a run that this host has not heard of; what is launched gets its edges as ever."""
    bench = Bench()
    program = bench.install(chain([bench.there, bench.here, bench.third, bench.here, bench.there]))
    run = client_id(1, 700)
    for index, segment in enumerate(bench.segments[:launched]):
        bench.sequence += 1
        arguments = msg.Arguments((b"",), (client_id(1, 701),)) if index == 0 else None
        bench.tell(msg.Launch(1, bench.sequence, run, program, segment, arguments, True))
    senders = [coordinator_of("b0"), coordinator_of("c0")]
    edges = [0, 2]
    if not launched:
        bench.edge(run, "b0", X)  # it is on its way already
    bench.cancel(run, program)
    for sender, edge, has_launch in zip(senders, edges, (launched > 0, launched > 1), strict=True):
        expected = [] if has_launch else [msg.EdgeCredit(run, edge, None)]
        assert bench.world.to(sender, msg.EdgeCredit) == expected
    assert bench.host.census()["edges_parked"] == 0


def test_a_run_that_is_run_again_replaces_its_results() -> None:
    """The end of the first attempt is not taken for that of the second, and no client hears of it."""
    bench = Bench()
    program = bench.install(chain([bench.here, bench.there, bench.here]))
    first, second = bench.segments
    waiting = bench.install(chain([bench.third, bench.here]))
    (held,) = bench.segments
    hold, _ = bench.launch(waiting, b"", segment=held)
    run, result = bench.launch(program, X.tobytes(), segment=first, last=False)
    bench.cancel(run, program)
    how = {"result": result, "segment": first, "last": False}
    again, _ = bench.launch(program, X.tobytes(), **how)
    bench.edge(hold, "c0", X)
    bench.settle()
    entry = bench.host.store.arrays[result]
    assert (entry.submitted, entry.value.error) == (False, None), "the first is given up"
    bench.sequence += 1
    bench.tell(msg.Launch(1, bench.sequence, again, program, second, None, True))
    bench.edge(again, "b0", X + 2, edge=1)
    bench.settle()
    np.testing.assert_array_equal(bench.value(result), X + 3)
    assert bench.host.store.arrays[result].submitted
    assert bench.host.census()["runs"] == 0


# --- copies -------------------------------------------------------------------------------------------


def test_a_copy_is_made_in_launch_order() -> None:
    """Before a donation that comes later, behind an edge that comes earlier."""
    bench = Bench()
    moved = bench.install(copy(bench.there, bench.here))
    (segment,) = bench.segments
    donating = bench.install(chain([bench.here], donated=(0,)))
    run, arriving = bench.launch(moved, b"", segment=segment)
    bench.replicate(arriving)
    _, after = bench.launch(donating, arriving)
    bench.settle()
    assert not bench.copies()
    assert not bench.host.backend.executed
    bench.edge(run, "b0", X)
    while bench.host.backend.queue:
        op = bench.host.backend.queue[0]
        bench.host.backend.step()
        if isinstance(op, ops.Execute):
            op.args[0].payload[0][...] = -1  # as a donation would
    bench.settle()
    np.testing.assert_array_equal(bench.copies()[arriving], X)
    np.testing.assert_array_equal(bench.value(after), X + 1)
    box = (bench.here.box(0),)
    assert not bench.world.to(CONTROL, msg.Holdings), (
        "the controller must not rely on replicas that a crash would take"
    )
    bench.world.wait(KEEP_S)
    assert bench.world.to(CONTROL, msg.Holdings) == [msg.Holdings((msg.Holding(arriving, box),))]
    assert bench.world.to(CONTROL, msg.Copied) == [msg.Copied(arriving, box)]


def test_what_has_no_value_is_not_copied_and_told() -> None:
    bench = Bench()
    raised = bench.install(chain([bench.here], b"raise"), b"raise")
    alone = bench.install(chain([bench.here]))
    _, failed = bench.launch(raised, X.tobytes())
    _, fine = bench.launch(alone, X.tobytes())
    gone = client_id(1, 400)
    bench.replicate(failed, gone, fine)
    bench.settle()
    assert list(bench.copies()) == [fine]
    assert bench.world.counters["copies_skipped"] == 2
    bench.world.wait(KEEP_S)
    told = {
        holding.array: (holding.boxes, holding.error and holding.error.kind)
        for m in bench.world.to(CONTROL, msg.Holdings)
        for holding in m.holdings
    }
    assert told == {
        failed: ((), "ComputationFailed"),
        gone: ((), "ArrayLost"),
        fine: ((bench.here.box(0),), None),
    }


def test_a_copy_takes_a_launch_number() -> None:
    bench = Bench()
    bench.sequence += 1
    bench.replicate()
    assert bench.told(msg.LaunchGap) == [msg.LaunchGap(1, 0, 1)]


def test_nothing_is_copied_for_a_client_that_has_gone() -> None:
    bench = Bench()
    alone = bench.install(chain([bench.here]))
    _, array = bench.launch(alone, X.tobytes())
    bench.replicate(array)
    bench.sequence += 1
    bench.tell(msg.Discard(1, bench.sequence, (), (), (1,)))
    bench.settle()
    assert not any(bench.host.census().values())
    assert not bench.world.to(store_of("b0"))


# --- the end of an epoch --------------------------------------------------------------------------------


def test_the_next_incarnation_has_what_the_last_handed_over() -> None:
    bench = Bench()
    alone = bench.install(chain([bench.here]))
    waiting = bench.install(chain([bench.there, bench.here]))
    (segment,) = bench.segments
    _, made = bench.launch(alone, X.tobytes())
    _, copied = bench.launch(alone, made)
    bench.replicate(copied)
    bench.launch(waiting, b"", segment=segment)
    bench.launch(alone, made)
    bench.settle()
    bench.tell(msg.LeaveIsland("a", 1, "host b0 was lost"), RESOURCES)
    assert bench.host.stopped == ["island a is formed anew: host b0 was lost"]
    assert [one.array for one in bench.host.handed_over] == [copied, made]
    sent = len(bench.world.sent)
    again = bench.host.restart(spare=True)
    holdings, no_more, registration = [message for _, _, message in bench.world.sent[sent:]]
    assert no_more == msg.HoldsNoMore()
    assert {holding.array for holding in holdings.holdings} == {copied, made}
    assert registration == msg.RegisterHost("a", 1, 1, "cpu", "", 1, spare=True)
    bench.host = again
    np.testing.assert_array_equal(bench.copies()[made], X + 1)
    np.testing.assert_array_equal(bench.copies()[copied], X + 2)


def test_copies_go_on_from_epoch_to_epoch() -> None:
    """Also when this one ends before the host has joined, or it never had a place."""
    array, box = client_id(1, 5), split(1, 1).box(0)
    bench = Bench(replicas=[Replica(array, box, X)])
    bench.tell(msg.LeaveIsland("a", 1, "formed anew"), RESOURCES)
    ((told, where, data, *_),) = bench.host.handed_over
    assert (told, where) == (array, box)
    np.testing.assert_array_equal(data.view(np.int64), X)


def test_a_host_leaves_once_and_only_its_own_epoch() -> None:
    bench = Bench()
    for epoch in (0, 2):
        bench.tell(msg.LeaveIsland("a", epoch, "another"), RESOURCES)
    assert not bench.host.stopped
    for _ in range(2):
        bench.tell(msg.LeaveIsland("a", 1, "over"), RESOURCES)
    bench.tell(msg.FormIsland("a", 2, ("a0",), 0, "", b"secret"), RESOURCES)
    bench.tell(msg.Leave("drained"), RESOURCES)
    assert bench.host.stopped == ["island a is formed anew: over"]
    assert not bench.host.finished
    program = bench.install(chain([bench.here]))
    bench.launch(program, X.tobytes())
    bench.settle()
    assert not bench.host.backend.executed
    assert not bench.told(msg.Progress)


def test_a_host_that_leaves_while_it_joins_does_not_say_that_it_has_joined() -> None:
    bench = Bench()
    joining: list[Any] = []
    bench.host = FakeHost(bench.world, "a0", bench.host.registration)
    bench.host.join = lambda form, joined: joining.append((form, joined))  # type: ignore[method-assign]
    sent = len(bench.world.sent)
    bench.tell(msg.FormIsland("a", 3, ("a0",), 0, "", b"secret"), RESOURCES)
    bench.tell(msg.LeaveIsland("a", 3, "over"), RESOURCES)
    assert len(bench.host.stopped) == 1
    ((form, joined),) = joining
    joined(msg.IslandJoined("a", form.epoch, "fake", 1, None))
    assert len(bench.world.sent) == sent


def test_a_host_that_is_drained_ends_for_good() -> None:
    bench = Bench()
    for _ in range(2):
        bench.tell(msg.Leave("drained"), RESOURCES)
    bench.tell(msg.LeaveIsland("a", 1, "over"), RESOURCES)
    assert (bench.host.finished, bench.host.stopped) == (["drained"], [])


def test_only_the_controller_says_who_is_a_host() -> None:
    bench = Bench()
    bench.tell(msg.Directory((msg.Peer("a0", ""), msg.Peer("x", ""))), Address("x", "session"))
    assert bench.world.counters["messages_refused"] == 1
    bench.tell(msg.Directory((msg.Peer("a0", ""), msg.Peer("spare", "", False))))
    assert bench.host.store.replicas.hosts == {"a0", "spare"}
    assert bench.host.coordinator.runs.hosts == {"a0"}
