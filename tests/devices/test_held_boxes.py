"""Replicas that go to files: when, what is told meanwhile, and what is left of the files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pw.core.errors import ErrorReport
from pw.core.ids import CONTROL, Address, client_id, session_of, store_of
from pw.core.landing import Bytes
from pw.core.messages import DropReplicas, Holdings, WriteReplicas
from pw.core.sharding import Box, DeviceAddress
from pw.devices.host.backend import Part
from pw.devices.host.replica_memory import KEEP_S, Replica, ReplicaMemory
from pw.devices.host.spill_files import SpillFolder
from pw.devices.host.store import ObjectStore
from tests.devices.test_spill_files import AtOnce
from tests.stages.actors import Recorder, World
from tests.stages.fake_devices import FakeBackend, FakeBulk

LEFT: Box = ((0, 8),)
RIGHT: Box = ((8, 16),)
A, B, C = (client_id(1, serial) for serial in (5, 6, 7))
FULL = ErrorReport("Error", "the disk is full", "a")


class ScriptedFiles:
    """Files that are complete when they are told to be."""

    def __init__(self) -> None:
        self.begun: list[tuple[list[Bytes], Callable[[Any], None]]] = []
        """The files that are being written: their parts, and what to call."""
        self.complete: list[list[Bytes]] = []

    def write(
        self, parts: Sequence[Part], devices: tuple[DeviceAddress, ...], done: Callable[[Any], None]
    ) -> None:
        assert not self.begun, "one after the other"
        self.begun.append(([data.copy() for _, _, data in parts], done))

    def end(self, error: ErrorReport | None = None) -> None:
        file, done = self.begun.pop()
        if error is None:
            self.complete.append(file)
        done(error or file)

    def view(self, file: list[Bytes], position: int) -> Bytes:
        return file[position]

    def delete(self, file: list[Bytes]) -> None:
        self.complete = [one for one in self.complete if one is not file]


class Bench:
    """One host's store, with files and a supervisor that takes what it is sent."""

    def __init__(
        self, files: Any = None, spill_bytes: int = 0, replicas: Sequence[Replica] = ()
    ) -> None:
        self.world = world = World()
        self.controller: Recorder = world.add(CONTROL, Recorder)
        world.backends["a"] = FakeBackend(world, "a")
        self.store: ObjectStore = world.add(
            store_of("a"),
            lambda env: ObjectStore(
                env,
                world.backends["a"],
                FakeBulk(world, "a"),
                dict,
                replicas,
                keep=self.keep,
                spill_bytes=spill_bytes,
                spill_files=files,
            ),
        )
        self.memory: ReplicaMemory = self.store.replicas.memory
        self.sent: list[dict[tuple[int, Box], bool]] = []
        """What the supervisor was sent, and whether it was in a file, one time after the other."""

    def keep(self, replicas: Sequence[Replica], kept: Callable[[ErrorReport | None], None]) -> None:
        self.sent.append({(one.array, one.box): one.in_file for one in replicas})
        kept(None)

    def hold(self, array: int, *where: Box, fill: int = 1, to_files: bool = False) -> None:
        values = {box: np.full(8, fill, np.uint8) for box in where}
        self.memory.hold(array, values, to_files=to_files)
        self.settle()

    def settle(self) -> None:
        self.world.wait(KEEP_S)
        self.world.settle()

    def say(self, message: object, sender: Address = CONTROL) -> None:
        self.world.post(sender, store_of("a"), message)
        self.settle()

    def told(self) -> set[tuple[int, Box]]:
        holdings = [one for message in self.controller.of(Holdings) for one in message.holdings]
        return {(one.array, box) for one in holdings for box in one.boxes}

    def in_files(self) -> dict[int, bool]:
        return {one.array: one.in_file for one in self.memory.all()}

    def bytes(self) -> tuple[int, int]:
        census = self.store.census()
        return census["replica_bytes"], census["replica_file_bytes"]


def test_the_controller_hears_of_a_copy_for_files_when_the_file_is_complete() -> None:
    files = ScriptedFiles()
    bench = Bench(files)
    bench.hold(A, LEFT, RIGHT, to_files=True)
    assert (bench.told(), bench.sent, bench.bytes()) == (set(), [], (16, 0))
    files.end()
    bench.settle()
    assert bench.told() == {(A, LEFT), (A, RIGHT)}
    assert bench.sent == [{(A, LEFT): True, (A, RIGHT): True}]
    assert bench.bytes() == (0, 16)
    assert bench.memory.of(A)[RIGHT] is files.complete[0][1]


def test_copies_for_files_are_kept_together() -> None:
    files = ScriptedFiles()
    bench = Bench(files)
    for array in (A, B):
        bench.hold(array, LEFT, to_files=True)
    files.end()
    bench.settle()
    assert (bench.told(), bench.sent) == (set(), [])
    files.end()
    bench.settle()
    assert bench.told() == {(A, LEFT), (B, LEFT)}
    assert len(bench.sent) == 1


def test_other_copies_are_kept_and_told_meanwhile() -> None:
    files = ScriptedFiles()
    bench = Bench(files)
    bench.hold(A, LEFT, to_files=True)
    bench.hold(B, LEFT)
    assert bench.told() == {(B, LEFT)}
    assert bench.sent == [{(B, LEFT): False}]
    bench.memory.announce()
    bench.settle()
    assert bench.told() == {(B, LEFT)}
    assert {one.array for one in bench.memory.leave()} == {A, B}, "the next incarnation has both"


def test_the_file_goes_with_the_last_box_in_it() -> None:
    files = ScriptedFiles()
    bench = Bench(files)
    bench.hold(A, LEFT, RIGHT, to_files=True)
    files.end()
    bench.hold(B, LEFT, to_files=True)
    files.end()
    bench.say(DropReplicas((A,)))
    assert [len(file) for file in files.complete] == [1]
    bench.store.replicas.drop_client(1)
    assert files.complete == []
    assert bench.bytes() == (0, 0)


def test_a_copy_that_is_dropped_while_it_is_written_leaves_no_file() -> None:
    files = ScriptedFiles()
    bench = Bench(files)
    bench.hold(A, LEFT, to_files=True)
    bench.say(DropReplicas((A,)))
    files.end()
    bench.settle()
    assert (files.complete, files.begun, bench.told(), bench.bytes()) == ([], [], set(), (0, 0))


def test_a_copy_that_is_replaced_while_it_is_written_is_written_again() -> None:
    files = ScriptedFiles()
    bench = Bench(files)
    bench.hold(A, LEFT, to_files=True)
    bench.hold(A, LEFT, fill=2)
    files.end()
    assert files.complete == []
    assert bench.told() == set()
    files.end()
    bench.settle()
    assert bench.told() == {(A, LEFT)}
    assert [file[0][0] for file in files.complete] == [2]


def test_a_copy_that_is_not_kept_yet_waits_for_its_file_when_one_is_wanted() -> None:
    files = ScriptedFiles()
    bench = Bench(files)
    bench.memory.hold(A, {LEFT: np.ones(8, np.uint8)})
    bench.hold(A, LEFT, to_files=True)
    assert bench.told() == set()
    files.end()
    bench.settle()
    assert bench.told() == {(A, LEFT)}
    assert bench.sent[-1] == {(A, LEFT): True}


def test_a_copy_that_cannot_be_written_stays_in_memory_and_the_log_says_so_once() -> None:
    files = ScriptedFiles()
    bench = Bench(files)
    for array in (A, B):
        bench.hold(array, LEFT, to_files=True)
        files.end(FULL)
        bench.settle()
    assert bench.told() == {(A, LEFT), (B, LEFT)}
    assert bench.bytes() == (16, 0)
    assert bench.world.logged == [("warning", "copies stay in host memory")]
    assert bench.world.counters["files_of_arrays_failed"] == 2
    bench.hold(A, LEFT, to_files=True)
    files.end()
    assert bench.in_files() == {A: True, B: False}, "who asks again has it tried again"


def test_without_a_folder_copies_stay_in_memory_and_the_log_says_so_once() -> None:
    bench = Bench()
    for array in (A, B):
        bench.hold(array, LEFT, to_files=True)
    assert bench.told() == {(A, LEFT), (B, LEFT)}
    assert bench.world.logged == [("info", "copies stay in host memory")]


def test_the_oldest_copies_leave_memory_when_there_are_too_many() -> None:
    files = ScriptedFiles()
    bench = Bench(files, spill_bytes=20)
    bench.hold(A, LEFT)
    bench.hold(B, LEFT)
    assert not files.begun
    bench.hold(C, LEFT, RIGHT)
    assert bench.told() == {(A, LEFT), (B, LEFT), (C, LEFT), (C, RIGHT)}, "nothing waits for it"
    files.end()
    assert bench.in_files() == {A: True, B: False, C: False}
    files.end()
    assert bench.in_files() == {A: True, B: True, C: False}
    assert not files.begun
    sent = len(bench.sent)
    bench.settle()
    assert len(bench.sent) == sent + 1
    assert bench.sent[-1][B, LEFT], "what the supervisor has of them is in memory no more"
    assert bench.bytes() == (16, 16)
    assert bench.world.counters["file_bytes_written"] == 16


def test_what_could_not_be_written_is_not_tried_again_by_itself() -> None:
    files = ScriptedFiles()
    bench = Bench(files, spill_bytes=10)
    bench.hold(A, LEFT)
    bench.hold(B, LEFT)
    files.end(FULL)
    files.end(FULL)
    assert not files.begun
    bench.hold(C, LEFT)
    files.end()
    assert (bench.in_files(), files.begun) == ({A: False, B: False, C: True}, [])


def test_the_controller_may_have_copies_written_that_are_there() -> None:
    files = ScriptedFiles()
    bench = Bench(files)
    bench.hold(A, LEFT)
    told = len(bench.controller.received)
    bench.say(WriteReplicas((A, C)), sender=session_of("x"))
    assert not files.begun
    bench.say(WriteReplicas((A, C)))
    files.end()
    assert bench.in_files() == {A: True}
    bench.say(WriteReplicas((A,)))
    assert not files.begun
    assert len(bench.controller.received) == told, "it knows them"


def test_an_empty_box_needs_no_file() -> None:
    files = ScriptedFiles()
    bench = Bench(files, spill_bytes=1)
    bench.memory.hold(A, {((0, 0),): np.zeros(0, np.uint8)}, to_files=True)
    bench.settle()
    assert (files.begun, bench.told()) == ([], {(A, ((0, 0),))})


def test_copies_that_the_last_incarnation_left_in_a_file_are_not_written_again() -> None:
    files = ScriptedFiles()
    value = np.zeros(8, np.uint8)
    left = [Replica(A, LEFT, value, b"", True), Replica(B, LEFT, value)]
    bench = Bench(files, spill_bytes=4, replicas=left)
    assert bench.bytes() == (8, 8)
    bench.say(WriteReplicas((A, B)))
    files.end()
    assert (bench.in_files(), files.begun) == ({A: True, B: True}, [])
    bench.say(DropReplicas((A, B)))
    assert (bench.bytes(), files.complete) == ((0, 0), [])


def test_on_a_disk_copies_have_their_bytes_and_leave_nothing(tmp_path: Path) -> None:
    folder = SpillFolder(str(tmp_path), AtOnce())
    bench = Bench(folder)
    values = {box: np.arange(8, dtype=np.uint8) + at for at, box in enumerate((LEFT, RIGHT))}
    bench.memory.hold(A, values, to_files=True)
    assert len(list(Path(folder.path).iterdir())) == 1
    for box, value in values.items():
        held = bench.memory.of(A)[box]
        assert isinstance(held.base, np.ndarray), "a view of the file"
        np.testing.assert_array_equal(held, value)
    view = bench.memory.of(A)[LEFT]
    bench.say(DropReplicas((A,)))
    assert not list(Path(folder.path).iterdir())
    np.testing.assert_array_equal(view, values[LEFT])
    folder.close()
