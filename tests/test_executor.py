"""One host's executor: launches strictly in order, whatever comes when."""

from __future__ import annotations

from typing import Any

import numpy as np

from pw.core.errors import ErrorReport, HostLost
from pw.core.ids import Address, client_id, coordinator_of, executor_of, scheduler_of
from pw.core.lower import lower
from pw.core.messages import (
    Arguments,
    Artifact,
    Directory,
    Discard,
    EdgeCredit,
    EdgeData,
    EdgeFailed,
    FormIsland,
    Install,
    Installed,
    Launch,
    LaunchGap,
    Peer,
    PeerLost,
    Progress,
    RegisterHost,
)
from pw.core.packing import pack
from pw.core.program import Computation, Node, Output, Program, Value
from pw.core.sharding import Binding, DeviceAddress
from pw.devices import backend as ops
from tests.actors import FakeHost, World
from tests.scripted import SMALL, chain, copy, digest, split

X = np.arange(SMALL)
SCHEDULER = scheduler_of("a")


class Bench:
    """Host "a0" in epoch 1, and programs over it and hosts that the test plays."""

    def __init__(self) -> None:
        self.world = World()
        self.host = FakeHost(self.world, "a0", RegisterHost("a", 1, 1, "cpu", "", 1))
        self.tell(FormIsland("a", 1, ("a0",), 0, "", b"secret"))
        self.sequence = -1
        self.serial = 0
        self.slices = {
            number: Binding(number, name[0], (DeviceAddress(name, 0),))
            for number, name in ((1, "a0"), (2, "b0"), (3, "c0"))
        }
        self.here, self.there, self.third = (split(number, 1) for number in (1, 2, 3))

    def tell(self, message: object, sender: Address = SCHEDULER, actor: str = "executor") -> None:
        self.world.mailboxes["a0"].append((sender, Address("a0", actor), message))
        self.world.drain("a0")

    def install(self, body: Program, blob: bytes = b"1", epoch: int = 1) -> int:
        self.serial += 1
        number = client_id(1, self.serial)
        plan = lower(body, self.slices)
        (mine,) = [host_plan for host_plan in plan.hosts if host_plan.host == "a0"]
        self.segments = [part.segment for part in mine.segments]
        artifacts = (Artifact(digest(blob), blob),)
        self.tell(Install(epoch, number, body, mine, artifacts))
        return number

    def launch(self, program: int, *args: Any, segment: int = 0, **how: Any) -> tuple[int, int]:
        """A run's first launch; its number and that of its only result."""
        self.sequence += 1
        self.serial += 2
        run, result = client_id(1, self.serial), client_id(1, self.serial - 1)
        arguments = Arguments(args, (result,))
        self.tell(
            Launch(
                how.get("epoch", 1),
                how.get("sequence", self.sequence),
                run,
                program,
                segment,
                how.get("last", True),
                arguments,
                True,
            )
        )
        return run, result

    def edge(self, run: int, source: str, values: Any, edge: int = 0) -> None:
        message = EdgeData(run, edge, pack([values]))
        self.tell(message, coordinator_of(source), "coordinator")

    def settle(self) -> None:
        self.world.settle()

    def value(self, array: int) -> Any:
        """What the store holds for an array."""
        found = self.host.store.value(array)
        assert found is not None
        return found.error if found.error is not None else found.payload[0]

    def told(self, kind: type) -> list[Any]:
        return self.world.to(SCHEDULER, kind)


def test_a_gap_stops_the_host_and_is_reported_once() -> None:
    bench = Bench()
    program = bench.install(chain([bench.here]))
    bench.launch(program, X.tobytes())
    bench.launch(program, X.tobytes(), sequence=2)
    bench.launch(program, X.tobytes(), sequence=1)
    bench.settle()
    assert bench.told(LaunchGap) == [LaunchGap(1, 1, 2)]
    assert len(bench.host.backend.executed) == 1


def test_a_launch_of_what_it_does_not_know_stops_the_host() -> None:
    bench = Bench()
    program = bench.install(chain([bench.here]))
    bench.tell(Launch(1, 0, client_id(1, 99), program, 0, True, None, True))
    bench.launch(program, X.tobytes(), sequence=1)
    bench.settle()
    assert len(bench.told(LaunchGap)) == 1
    assert not bench.host.backend.executed


def test_what_another_epoch_sends_is_dropped() -> None:
    bench = Bench()
    bench.install(chain([bench.here]), epoch=2)
    bench.settle()
    assert not bench.told(Installed)
    assert not any(bench.host.census().values())
    program = bench.install(chain([bench.here]))
    bench.launch(program, X.tobytes(), epoch=2, sequence=0)
    bench.launch(program, X.tobytes(), epoch=1, sequence=0)
    bench.settle()
    assert not bench.told(LaunchGap)
    assert [progress.epoch for progress in bench.told(Progress)] == [1]


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
    assert not bench.host.store.is_submitted(through)
    bench.edge(run, "b0", X)
    bench.settle()
    np.testing.assert_array_equal(bench.value(through), X)
    np.testing.assert_array_equal(bench.value(after), X + 1)
    (data,) = bench.world.to(coordinator_of("b0"), EdgeData)
    np.testing.assert_array_equal(np.frombuffer(data.data, np.int64), X + 1)
    assert bench.host.store.is_submitted(through)


def two_sources(bench: Bench) -> Program:
    """A sum of one input from each of two other islands."""
    specs = (bench.here, bench.here)
    add = Computation("add", digest(b"1"), bench.here.placement, specs, (bench.here,))
    return Program(
        "sum",
        (add,),
        (Node(0, (Value(-1, 0), Value(-1, 1))),),
        (bench.there, bench.third),
        (Output(Value(0, 0), bench.here),),
    )


def test_an_edge_that_failed_before_its_launch_does_not_start_the_launch_early() -> None:
    for order in (("b0", "c0"), ("c0", "b0")):
        bench = Bench()
        program = bench.install(two_sources(bench))
        (segment,) = bench.segments
        run = client_id(1, bench.serial + 2)
        edges = {"b0": 0, "c0": 1}
        failed = EdgeFailed(run, edges[order[0]], ErrorReport("ComputationFailed", "there"))
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
    bench.tell(Directory((Peer("a0", ""), Peer("b0", ""))))
    _, before = bench.launch(program, b"", segment=segment)
    bench.tell(Directory((Peer("a0", ""),)))
    _, after = bench.launch(program, b"", segment=segment)
    bench.settle()
    assert [bench.value(array).kind for array in (before, after)] == [HostLost.__name__] * 2
    bench.tell(Directory((Peer("a0", ""), Peer("b0", ""))))
    run, again = bench.launch(program, b"", segment=segment)
    bench.edge(run, "b0", X + 1)
    bench.settle()
    np.testing.assert_array_equal(bench.value(again), X + 2)
    bench.launch(program, b"", segment=segment)
    bench.tell(PeerLost("b0", "silent"), actor="coordinator")
    bench.settle()
    assert len(bench.told(Progress)) >= 1
    assert not bench.host.executor._queue


def test_discards_take_their_place_behind_launches() -> None:
    bench = Bench()
    waiting = bench.install(chain([bench.there, bench.here]))
    (segment,) = bench.segments
    alone = bench.install(chain([bench.here]))
    _, x = bench.launch(alone, X.tobytes())
    run, _ = bench.launch(waiting, b"", segment=segment)
    _, y = bench.launch(alone, x)
    bench.sequence += 1
    bench.tell(Discard(1, bench.sequence, (x,), (alone,), ()))
    bench.settle()
    assert f"{alone}/0".encode() in bench.host.backend.installed
    bench.edge(run, "b0", X)
    bench.settle()
    np.testing.assert_array_equal(bench.value(y), X + 2)
    assert f"{alone}/0".encode() not in bench.host.backend.installed
    bench.sequence += 1
    bench.tell(Discard(1, bench.sequence, (), (), (1,)))
    bench.settle()
    assert not any(bench.host.census().values())


def test_a_run_that_is_cut_short_poisons_what_it_has_not_made() -> None:
    bench = Bench()
    program = bench.install(chain([bench.here, bench.there, bench.here]))
    first, _ = bench.segments
    run, result = bench.launch(program, X.tobytes(), segment=first, last=False)
    bench.sequence += 1
    bench.tell(Launch(1, bench.sequence, run, program, -1, True, None, False))
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
    (progress,) = bench.told(Progress)
    assert [finished.sequence for finished in progress.finished] == list(range(5))


def test_an_artifact_that_did_not_come_is_a_compile_error() -> None:
    bench = Bench()
    bench.install(chain([bench.here]), b"2")
    bench.settle()
    (installed,) = bench.told(Installed)
    assert installed.error.kind == "CompileError"
    assert "did not come" in installed.error.message


def test_the_sender_of_a_credit_is_answered_whatever_has_become_of_the_edge() -> None:
    assert executor_of("a0") == Address("a0", "executor")
    bench = Bench()
    landing = bench.host.bulk.land(10, lambda buffer: None)
    bench.sequence += 1
    bench.tell(Discard(1, bench.sequence, (), (), (1,)))
    credit = EdgeCredit(client_id(1, 1), 0, landing)
    bench.tell(credit, coordinator_of("b0"), "coordinator")
    (failed,) = bench.world.to(coordinator_of("b0"), EdgeFailed)
    assert failed.error.kind == "Disconnected"
    assert not [op for op in bench.host.backend.queue if isinstance(op, ops.Execute)]
