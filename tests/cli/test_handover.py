"""What a runtime child leaves reaches the next one, and a child that hangs is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import os
import re
import select
import signal
import socket
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pw.cli import handover
from pw.cli.keeping import Keeper
from pw.cli.parcel_files import KEPT_FOR_S, ParcelFile
from pw.cli.supervision import Begin, ChildLink, Parcel, SupervisorLink, ToSupervisor, Watch
from pw.core.errors import ArgumentError, ErrorReport
from pw.devices.host.replica_memory import Replica
from pw.processes.channel import Channel
from tests.stages.daemons import Program, left_in_shared_memory, send, until, until_true

BOX = ((0, 2), (3, 7))
VALUES: dict[str, np.ndarray[Any, Any]] = {
    "matrix": np.arange(8, dtype=np.float32).reshape(2, 4),
    "column": np.arange(20, dtype=np.int16).reshape(4, 5)[:, 2],
    "transposed": np.arange(6.0).reshape(2, 3).T,
    "scalar": np.array(3.5),
    "nothing": np.zeros((0, 3), np.float32),
    "bfloat16": np.array([1, 2.5, -3], ml_dtypes.bfloat16),
    "bool": np.array([True, False, True]),
    "bytes": np.frombuffer(bytes(range(100)), np.uint8),
}


def packed(values: list[np.ndarray[Any, Any]]) -> Parcel:
    return handover.pack(Replica(7 + i, BOX, value) for i, value in enumerate(values))


def test_arrays_of_any_layout_come_back_aligned_and_read_only() -> None:
    values = list(VALUES.values())
    replicas = handover.unpack(packed(values), lambda: None)
    assert [(one.array, one.box) for one in replicas] == [(7 + i, BOX) for i in range(len(values))]
    for value, copy in zip(values, (one.data for one in replicas), strict=True):
        assert (copy.dtype, copy.shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(copy, value)
        assert copy.ctypes.data % 64 == 0
        assert not copy.flags.writeable


def test_a_parcel_in_a_file_is_that_of_the_next_worker_with_the_name(tmp_path: Path) -> None:
    values = list(VALUES.values())
    parcel = packed(values)
    file = ParcelFile(str(tmp_path / "left"), "east/0")
    assert file.load() is None
    file.store(parcel)
    parcel.close()
    assert ParcelFile(str(tmp_path / "left"), "east/1").load() is None
    (path,) = (tmp_path / "left").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    loaded = ParcelFile(str(tmp_path / "left"), "east/0").load()
    assert loaded is not None
    for value, replica in zip(values, handover.unpack(loaded, lambda: None), strict=True):
        np.testing.assert_array_equal(replica.data, value)
    file.remove()
    assert file.load() is None


def test_a_parcel_file_that_is_old_torn_or_damaged_is_not_read(tmp_path: Path) -> None:
    file = ParcelFile(str(tmp_path), "a")
    with contextlib.closing(packed([np.arange(1000)])) as parcel:
        file.store(parcel)
        (path,) = tmp_path.iterdir()
        whole = path.read_bytes()
        damaged = bytearray(whole)
        damaged[1000] ^= 1
        for part in (b"", whole[:7], whole[:-1], whole[:-48], whole[1:], bytes(damaged)):
            path.write_bytes(part)
            with pytest.raises(OSError, match=r"a\.parcel was damaged"):
                file.load()
        file.store(parcel)
        old_s = path.stat().st_mtime - KEPT_FOR_S - 60
        os.utime(path, (old_s, old_s))
        with pytest.raises(OSError, match="is too old"):
            file.load()
        file.remove()
        file.remove()
        assert not path.exists()


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match=r"--keep-files .*/file/more: Not a directory"):
        ParcelFile(str(tmp_path / "file" / "more"), "a")


def test_a_mapped_array_can_be_aliased_by_jax_and_donated() -> None:
    """Donation of what aliases read-only pages must copy, not write."""
    import jax

    value = np.arange(4096, dtype=np.float32)
    ((_, _, copy, *_),) = handover.unpack(packed([value]), lambda: None)
    x = jax.device_put(copy)
    doubled = jax.jit(lambda x: x * 2, donate_argnums=0)(x)
    np.testing.assert_array_equal(doubled, value * 2)
    np.testing.assert_array_equal(copy, value)


def test_the_file_is_let_go_when_the_last_array_is_gone() -> None:
    told: list[bool] = []
    replicas = handover.unpack(packed([np.arange(5), np.arange(6)]), lambda: told.append(True))
    del replicas[0]
    gc.collect()
    assert not told
    del replicas
    gc.collect()
    assert told == [True]


def test_what_there_is_no_room_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    written = os.pwrite

    def short_of_memory(descriptor: int, data: bytes, offset: int) -> int:
        if len(data) > 10_000:
            raise OSError(28, "No space left on device")
        return written(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", short_of_memory)
    small, large = np.arange(10), np.zeros(20_000, np.uint8)
    saved = [Replica(7 + i, BOX, value) for i, value in enumerate((small, large, small))]
    parcel = handover.pack_what_fits(saved, lambda: None)
    ((array, _, copy, *_),) = handover.unpack(parcel, lambda: None)
    assert array == 7
    np.testing.assert_array_equal(copy, small)


@pytest.mark.parametrize("in_file", [False, True])
def test_a_parcel_with_replicas_in_files_is_a_file_on_that_disk(
    in_file: bool, tmp_path: Path
) -> None:
    saved = [Replica(7, BOX, np.arange(10), b"", in_file), Replica(8, BOX, np.arange(3))]
    for parcel in (
        handover.pack(saved, str(tmp_path)),
        handover.pack_what_fits(iter(saved), lambda: None, str(tmp_path)),
    ):
        link = os.readlink(f"/proc/self/fd/{parcel.descriptor}")
        assert link.startswith(str(tmp_path)) == in_file
        assert not list(tmp_path.iterdir()), "it has no name"
        first, second = handover.unpack(parcel, lambda: None)
        assert (first.in_file, second.in_file) == (in_file, in_file)
        np.testing.assert_array_equal(first.data, np.arange(10))


def test_without_room_on_the_disk_a_parcel_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = [Replica(7, BOX, np.arange(10), b"", True)]
    missing = handover.pack(saved, str(tmp_path / "missing"))
    pwrite, left = os.pwrite, [OSError(errno.ENOSPC, "no space left")]

    def full_once(descriptor: int, data: Any, offset: int) -> int:
        if left:
            raise left.pop()
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(handover.os, "pwrite", full_once)
    for parcel in (missing, handover.pack(saved, str(tmp_path))):
        ((_, _, copy, _, in_file),) = handover.unpack(parcel, lambda: None)
        assert not in_file
        np.testing.assert_array_equal(copy, np.arange(10))
    assert not list(tmp_path.iterdir())


def test_a_child_beats_while_an_array_is_on_its_way_from_a_device() -> None:
    beats = threading.Semaphore(0)

    def fetched() -> Iterator[Replica]:
        for _ in range(3):
            assert beats.acquire(timeout=60), "its supervisor takes it for stuck"
        yield Replica(7, BOX, np.arange(3))

    parcel = handover.pack_what_fits(fetched(), beats.release)
    ((_, _, copy, *_),) = handover.unpack(parcel, lambda: None)
    np.testing.assert_array_equal(copy, np.arange(3))
    assert "pw-beat" not in [thread.name for thread in threading.enumerate()]


# --- the socket ----------------------------------------------------------------------------------------


class Pair:
    """Both ends of the socket, in one process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.supervisor = ChildLink(Channel(ours, ToSupervisor, descriptors=1), Watch(1.0, 3.0))
        self.child = SupervisorLink(theirs.detach())

    @classmethod
    def begun(cls, parcel: Parcel | None = None) -> Pair:
        pair = cls()
        pair.supervisor.begin(5, True, parcel)
        return pair


@pytest.fixture
def descriptors() -> Iterator[Callable[[], int]]:
    """Counts this process's open descriptors; none may be left at the end."""

    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = count()
    yield count
    assert count() == before


def test_a_parcel_is_kept_until_another_one_replaces_it(descriptors: Callable[[], int]) -> None:
    pair = Pair.begun()
    assert pair.child.begin() == (Begin(5, True, -1), None)
    kept: Parcel | None = None
    for value in (np.arange(3), np.arange(4)):
        parcel = packed([value])
        pair.child.hand_over(parcel)
        parcel.close()
        kept = pair.supervisor.listen(kept)
    assert kept is not None
    open_here = descriptors()
    for _ in range(2):  # the first of these children dies without having left anything
        after = Pair.begun(kept)
        begun = after.child.begin()
        assert begun is not None
        assert begun[1] is not None
        ((_, _, copy, *_),) = handover.unpack(begun[1], lambda: None)
        np.testing.assert_array_equal(copy, np.arange(4))
        after.child.channel.close()
        kept = after.supervisor.listen(kept)
        assert after.supervisor.channel.ended
        after.supervisor.channel.close()
        del copy
    assert descriptors() == open_here
    assert kept is not None
    empty = packed([])
    pair.child.hand_over(empty)
    empty.close()
    kept = pair.supervisor.listen(kept)
    assert kept is not None
    assert handover.unpack(kept, lambda: None) == []
    pair.child.channel.close()
    pair.supervisor.channel.close()


def test_a_parcel_that_nobody_uses_is_not_kept(descriptors: Callable[[], int]) -> None:
    kept = packed([np.arange(3)])
    pair = Pair.begun(kept)
    begun = pair.child.begin()
    assert begun is not None
    assert begun[1] is not None
    replicas = handover.unpack(begun[1], pair.child.dropped)
    assert pair.supervisor.listen(kept) is kept
    del replicas
    gc.collect()
    assert pair.supervisor.listen(kept) is None
    # What is handed over afterwards is not what was dropped.
    parcel = packed([np.arange(2)])
    pair.child.hand_over(parcel)
    parcel.close()
    pair.child.dropped()
    last = pair.supervisor.listen(None)
    assert last is not None
    last.close()
    pair.child.channel.close()
    pair.supervisor.channel.close()


def test_a_supervisor_that_does_not_read_has_room_for_what_is_handed_over() -> None:
    """Neither the beats of many minutes, nor those beside a thousand arrays, fill the socket."""
    pair = Pair.begun()
    pair.child.begin()
    for _ in range(1000):
        pair.child.beat()
    saved = [Replica(7 + i, BOX, np.arange(3)) for i in range(1000)]
    for count in (10, 1000):
        parcel = handover.pack_what_fits(saved[:count], pair.child.beat)
        pair.child.hand_over(parcel)
        parcel.close()
    assert len(pair.child.arrived()) == 0, "nothing is answered that was not read"
    kept = pair.supervisor.listen(None)
    assert len(pair.child.arrived()) == 2
    assert kept is not None
    assert len(handover.unpack(kept, lambda: None)) == 1000
    pair.child.beat()
    pair.supervisor.listen(None)
    assert len(pair.child.arrived()) == 0
    assert not pair.child.channel.ended
    pair.supervisor.channel.close()
    pair.child.arrived()
    assert pair.child.channel.ended
    pair.child.channel.close()


class Loop:
    """A runtime's event loop with a `Keeper`, and its supervisor, which reads when it is told to."""

    def __init__(self) -> None:
        self.pair = Pair.begun()
        self.pair.child.begin()
        self.loop = asyncio.new_event_loop()
        self.ended = False
        self.keeper = Keeper("a", self.loop, self.pair.child, self._end)
        self.kept: list[ErrorReport | None] = []
        self.parcel: Parcel | None = None

    def _end(self) -> None:
        self.ended = True

    def keep(self, *values: np.ndarray[Any, Any]) -> None:
        replicas = [Replica(7 + i, BOX, value) for i, value in enumerate(values)]
        self.keeper.keep(replicas, self.kept.append)

    def turn(self, until: Callable[[], bool]) -> None:
        """Let the loop turn until something is so."""
        self.loop.run_until_complete(until_true(until))

    def is_sent(self) -> bool:
        return bool(select.select([self.pair.supervisor.channel], [], [], 0)[0])

    def listen(self) -> None:
        self.parcel = self.pair.supervisor.listen(self.parcel)

    def values(self) -> list[np.ndarray[Any, Any]]:
        assert self.parcel is not None
        parcel, self.parcel = self.parcel, None
        return [one.data for one in handover.unpack(parcel, lambda: None)]


@pytest.fixture
def runtime() -> Iterator[Loop]:
    runtime = Loop()
    yield runtime
    runtime.pair.supervisor.channel.close()
    runtime.turn(lambda: runtime.ended)
    runtime.pair.child.channel.close()
    runtime.loop.close()
    if runtime.parcel is not None:
        runtime.parcel.close()


def test_what_is_to_be_kept_is_answered_when_the_supervisor_has_it(runtime: Loop) -> None:
    for number in range(20):  # in a row
        runtime.keep(np.full(100, number))
        runtime.turn(runtime.is_sent)
        assert len(runtime.kept) == number, "it is stopped, and the loop turns"
        runtime.listen()
        runtime.turn(lambda number=number: len(runtime.kept) > number)  # type: ignore[misc]
    assert runtime.kept == [None] * 20
    np.testing.assert_array_equal(runtime.values(), [np.full(100, 19)])


def test_what_is_left_at_the_end_comes_after_what_was_being_kept(runtime: Loop) -> None:
    runtime.keep(np.arange(3))
    runtime.turn(runtime.is_sent)
    runtime.keeper.hand_over([Replica(7, BOX, np.arange(4))])
    runtime.pair.child.beat()
    runtime.listen()
    np.testing.assert_array_equal(runtime.values(), [np.arange(4)])


def test_what_is_still_being_written_at_the_end_is_not_sent_behind_what_is_left(
    runtime: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = threading.Event()
    packed = handover.pack

    def slow(*replicas: Any) -> Parcel:
        written.wait(60)
        return packed(*replicas)

    monkeypatch.setattr(handover, "pack", slow)
    runtime.keep(np.arange(3))
    runtime.keeper.hand_over([Replica(7, BOX, np.arange(4))])
    written.set()
    runtime.turn(lambda: not [t for t in threading.enumerate() if t.name == "pw-keep"])
    runtime.turn(runtime.is_sent)
    runtime.listen()
    np.testing.assert_array_equal(runtime.values(), [np.arange(4)])
    assert runtime.kept == []


@pytest.mark.parametrize("is_full", [False, True])
def test_at_the_end_of_a_cluster_replicas_are_left_to_none_without_an_error(
    runtime: Loop, is_full: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> Parcel:
        raise OSError(errno.ENOSPC, "no space left")

    runtime.pair.supervisor.channel.close()
    if is_full:
        monkeypatch.setattr(handover, "pack_what_fits", full)
    with caplog.at_level("DEBUG", "pw"):
        runtime.keeper.hand_over([Replica(7, BOX, np.arange(4))])
    said = [(one.levelname, one.getMessage()) for one in caplog.records]
    expected = ("ERROR", "no replicas are handed over") if is_full else ("DEBUG", "no supervisor")
    assert [(level, words[: len(expected[1])]) for level, words in said] == [expected]


def test_what_was_to_be_kept_as_the_supervisor_ended_is_no_error(
    runtime: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.pair.supervisor.channel.close()
    with caplog.at_level("DEBUG", "pw"):
        runtime.keep(np.arange(3))
        runtime.turn(lambda: bool(caplog.records or runtime.kept))
    assert [one.getMessage() for one in caplog.records] == ["no supervisor keeps replicas node=a"]
    assert runtime.kept == [], "no checkpoint is told that there was no room"


def test_where_there_is_no_room_what_was_kept_before_still_is(
    runtime: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.keep(np.arange(3))
    runtime.turn(runtime.is_sent)
    runtime.listen()
    runtime.turn(lambda: bool(runtime.kept))

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    runtime.keep(np.arange(3), np.arange(4))
    runtime.turn(lambda: len(runtime.kept) == 2)
    monkeypatch.undo()
    assert runtime.kept[0] is None
    assert runtime.kept[1] is not None
    assert runtime.kept[1].kind == "CheckpointFailed"
    assert "host a" in runtime.kept[1].message
    runtime.listen()
    np.testing.assert_array_equal(runtime.values(), [np.arange(3)])


def test_a_child_hears_that_its_supervisor_ended_before_it_began() -> None:
    pair = Pair()
    pair.supervisor.channel.close()
    assert pair.child.begin() is None
    pair.child.channel.close()


WATCHED: dict[str, tuple[list[tuple[str, float]], bool]] = {
    "beats": ([("beat", 1), ("ask", 2), ("beat", 2), ("ask", 3), ("ask", 4), ("ask", 5)], False),
    "is silent": ([("beat", 1), ("ask", 2), ("ask", 3), ("ask", 4), ("ask", 4.5)], True),
    "is at its limit": ([("beat", 1), ("ask", 2), ("ask", 3), ("ask", 4)], False),
    "has not begun to beat": ([("ask", moment) for moment in range(60)], False),
    "was not listened to": ([("beat", 1), ("ask", 2), ("ask", 9)], False),
    "was not listened to and then is silent": (
        [("beat", 1), ("ask", 2), ("ask", 9), ("ask", 10), ("ask", 11), ("ask", 11.5)],
        True,
    ),
}


@pytest.mark.parametrize("what", WATCHED)
def test_a_child_that(what: str) -> None:
    """With a heartbeat of one second and a silence of three."""
    happens, silent = WATCHED[what]
    watch = Watch(1.0, 3.0)
    judged: list[bool] = []
    for event, now_s in happens:
        if event == "beat":
            watch.beat(now_s)
        else:
            judged.append(watch.is_silent(now_s))
    assert judged[-1] is silent
    assert not any(judged[:-1])


# --- the real supervisor, over a runtime that is none ---------------------------------------------------

CHILD = """
import json, os, signal, sys, threading, time
import numpy as np
from pw.cli import handover
from pw.devices.host.replica_memory import Replica

def run(options, link):
    begin, parcel = link.begin()
    replicas = [] if parcel is None else handover.unpack(parcel, link.dropped)
    found = {one.array: one.data.tolist() for one in replicas if one.proof == b"proof"}

    def beat():
        while True:
            link.beat()
            time.sleep(0.2)

    threading.Thread(target=beat, daemon=True).start()
    print(json.dumps([os.getpid(), begin.spare, found]), flush=True)
    for line in open(options.controller.removeprefix("ipc://")):
        what, value = json.loads(line)
        if what == "leave":
            replicas = [Replica(1, ((0, 3),), np.array(value), b"proof")] if value else []
            link.hand_over(handover.pack(replicas))
            os._exit(75)
        if what == "finish":
            os._exit(0)
    signal.pause()
"""


class Supervised:
    """`pw-worker` whose runtime does what it is told through a named pipe.

    A child that is silent is killed once the file `may_kill` exists: others are slow at most.
    """

    def __init__(self, folder: Path) -> None:
        self.pipe, self.may_kill = folder / "orders", folder / "may kill"
        os.mkfifo(self.pipe)
        module = folder / "path" / "fake_runtime.py"
        module.parent.mkdir()
        module.write_text(CHILD)
        body = f"""
            import os, sys
            from pw.cli import supervisor, worker

            class Watch(supervisor.Watch):
                def is_silent(self, now_s):
                    kills = super().is_silent(now_s) and os.path.exists({str(self.may_kill)!r})
                    if kills:
                        os.unlink({str(self.may_kill)!r})
                    return kills

            supervisor.Watch = Watch
            sys.path.append({str(module.parent)!r})
            sys.argv = ["pw-worker", "--controller", "ipc://{self.pipe}", "--island", "i"]
            supervisor.RUNTIME = "fake_runtime"
            worker.main()
            """
        self.program = Program(folder, ["-c", textwrap.dedent(body)])
        self.children = 0

    def next_child(self) -> tuple[int, bool, dict[str, Any]]:
        """Process id, whether it is a spare, and what it was given."""
        self.children += 1
        until(
            lambda: self.program.out.count("\n") >= self.children,
            f"child {self.children}; {self.program.err}",
        )
        pid, spare, found = json.loads(self.program.out.splitlines()[self.children - 1])
        return pid, spare, found

    def tell(self, what: str, value: object = None) -> None:
        with self.pipe.open("w") as pipe:
            pipe.write(json.dumps([what, value]) + "\n")


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    started = Supervised(tmp_path)
    yield started
    started.program.kill()


@pytest.mark.processes
def test_the_next_child_gets_what_the_last_one_left(supervised: Supervised) -> None:
    program = supervised.program
    first, spare, found = supervised.next_child()
    assert (spare, found) == (False, {})
    supervised.tell("leave", [1, 2, 3])
    second, spare, found = supervised.next_child()
    assert (spare, found) == (True, {"1": [1, 2, 3]})
    send(second, signal.SIGKILL)
    third, spare, found = supervised.next_child()
    assert (spare, found) == (True, {"1": [1, 2, 3]})
    supervised.tell("leave", [])
    fourth, _, found = supervised.next_child()
    assert found == {}
    assert len({first, second, third, fourth}) == 4
    supervised.tell("finish")
    assert program.end() == 0, program.err
    assert left_in_shared_memory() == []


@pytest.mark.processes
def test_a_child_that_was_stopped_is_killed_and_replaced(supervised: Supervised) -> None:
    program = supervised.program
    first, _, _ = supervised.next_child()
    supervised.tell("leave", [4])
    second, _, _ = supervised.next_child()
    send(second, signal.SIGSTOP)
    supervised.may_kill.touch()
    third, _, found = supervised.next_child()
    assert found == {"1": [4]}
    assert third in program.family()
    assert program.family().isdisjoint({first, second})
    words = rf"runtime is stuck and is killed node=\S+ process={second} silence_s=10.0"
    assert len([line for line in program.err.splitlines() if "stuck" in line]) == 1
    assert re.search(words, program.err)
    assert first != second != third


def test_a_runtime_that_never_lives_long_is_started_again_all_the_same() -> None:
    from pw.cli.process import EXIT_AGAIN, EXIT_ERROR
    from pw.cli.supervisor import LONGEST_PAUSE_S, pause_before

    assert pause_before(EXIT_AGAIN, 1) == 0.0 < pause_before(EXIT_ERROR, 1)
    assert pause_before(EXIT_AGAIN, 5000) == LONGEST_PAUSE_S


def test_a_refused_worker_tries_again_ever_more_slowly() -> None:
    from pw.cli.supervisor import pause_when_refused

    assert [pause_when_refused(times) for times in (0, 1, 2, 4, 5, 5000)] == [2, 4, 8, 32, 60, 60]
