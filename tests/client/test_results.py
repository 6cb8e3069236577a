"""A result that a thread has waited for is asked for together with the next run of its program."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from pw.client.connection import results
from pw.client.connection.runtime import Runtime
from pw.client.session.thread_messages import Await, Get, Tell, reject, resolve
from pw.core.errors import HostLost
from pw.core.messages import INLINE_BYTES, Run
from pw.core.sharding import ArraySpec, Placement, Sharding
from tests.stages.scripted_thread import Scripted

SPEC = ArraySpec((4,), "float32", Sharding((), ()), Placement(1, (0,)))
F, G = 1, 2
"""Programs."""


class Script:
    """A script whose runs end when it says so."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        assert isinstance(runtime.thread, Scripted)
        self._notes = runtime.thread.notes

    def run(self, program: int, results: int = 3) -> list[int]:
        self._notes.clear()
        made = self.runtime.run(program, [], results)
        self.runtime.grant(1)
        return made

    def asked_with_run(self) -> list[int]:
        """The arrays that the newest run was sent with a question for."""
        asked = self._asked_with_run()
        return [] if asked is None else [array for array, _ in asked.arrays]

    def _asked_with_run(self) -> Await | None:
        tell, *asked = self._notes[:2]
        assert isinstance(tell, Tell)
        assert isinstance(tell.message, Run)
        return next((note for note in asked if isinstance(note, Await)), None)

    def value_asked_with_run(self) -> Get | None:
        """The question for a value that the newest run was sent with."""
        return next((note for note in self._notes[1:2] if isinstance(note, Get)), None)

    def read(self, array: int) -> tuple[Future[Any], bool]:
        """Begin to read an array; returns the future, and whether that is a question of its own."""
        before = len(self._notes)
        future = self.runtime.fetch(array, SPEC)
        return future, len(self._notes) > before

    def wait(self, array: int) -> tuple[Future[Any], bool]:
        """Wait for an array; returns the future, and whether that is a question of its own."""
        before = len(self._notes)
        future = self.runtime.wait([(array, SPEC)])
        asked = self._notes[before:]
        assert all(isinstance(note, Await) for note in asked)
        return future, bool(asked)

    def settle(self, error: Exception | None = None) -> None:
        """Answer the question that went with the newest run."""
        asked = self._asked_with_run()
        assert asked is not None
        if error is None:
            resolve(asked.ready, None)
        else:
            reject(asked.ready, error)


@pytest.fixture
def script() -> Iterator[Script]:
    runtime = Runtime(Scripted, 1.0, 0)
    yield Script(runtime)
    runtime.close()


def test_the_next_run_asks_for_the_result_that_was_waited_for(script: Script) -> None:
    made = script.run(F)
    assert script.asked_with_run() == []
    assert script.wait(made[1])[1]
    for _ in range(3):
        made = script.run(F)
        assert script.asked_with_run() == [made[1]]
        future, is_own = script.wait(made[1])
        assert not is_own
        assert not future.done()
        script.settle()
        assert future.result(0) is None


def test_it_asks_for_what_is_waited_for_behind_runs_of_other_programs(script: Script) -> None:
    made = script.run(F)
    script.run(G)
    script.wait(made[2])
    for _ in range(2):
        made = script.run(F)
        assert script.asked_with_run() == [made[2]]
        script.run(G)
        assert script.asked_with_run() == []
        assert not script.wait(made[2])[1]


def test_a_question_in_vain_is_the_last_one_until_a_thread_waits_again(script: Script) -> None:
    script.wait(script.run(F)[0])
    made = script.run(F)
    assert script.asked_with_run() == [made[0]]
    for _ in range(2):
        made = script.run(F)
        assert script.asked_with_run() == []
    script.wait(made[0])
    made = script.run(F)
    assert script.asked_with_run() == [made[0]]


@pytest.mark.parametrize("behind", [1, 5])
def test_a_thread_that_waits_some_runs_behind_asks_with_each_run(
    script: Script, behind: int
) -> None:
    made = [script.run(F) for _ in range(behind + 1)]
    for step in range(4 * behind):
        assert script.wait(made[step][1])[1] == (step <= behind), "asked with its run"
        made.append(script.run(F))
        assert script.asked_with_run() == [made[-1][1]]
    script.run(F)
    assert script.asked_with_run() == [], "no thread has waited"


def test_the_next_run_asks_for_the_value_that_was_read(script: Script) -> None:
    made = script.run(F)
    assert script.read(made[1])[1]
    for step in range(3):
        made = script.run(F)
        note = script.value_asked_with_run()
        assert note is not None
        assert note.array == made[1]
        future, is_own = script.read(made[1])
        assert not is_own
        value = np.full(4, step, np.float32)
        resolve(note.parts, [(((0, 4),), value)])
        np.testing.assert_array_equal(future.result(0), value)


def test_a_thread_that_waits_and_then_reads_asks_once(script: Script) -> None:
    made = script.run(F)
    script.wait(made[0]), script.read(made[0])
    for _ in range(3):
        made = script.run(F)
        note = script.value_asked_with_run()
        assert note is not None
        waiting, is_own = script.wait(made[0])
        assert not is_own
        resolve(note.parts, [(((0, 4),), np.zeros(4, np.float32))])
        assert waiting.done()
        assert not script.read(made[0])[1]


def test_what_a_thread_has_done_last_decides_what_the_next_run_asks(script: Script) -> None:
    script.read(script.run(F)[0])
    made = script.run(F)
    assert script.value_asked_with_run() is not None
    script.wait(made[0])
    made = script.run(F)
    assert script.asked_with_run() == [made[0]]
    assert script.read(made[0])[1], "it was only asked whether it is ready"
    script.run(F)
    assert script.value_asked_with_run() is not None
    script.run(F)
    assert script.value_asked_with_run() is None, "no thread has read it"


def test_a_cancelled_future_serves_no_other_thread(script: Script) -> None:
    script.read(script.run(F)[0])
    made = script.run(F)
    waiting, _ = script.wait(made[0])
    waiting.cancel()
    future, is_own = script.read(made[0])
    assert is_own
    assert not future.cancelled()


@pytest.mark.parametrize("reads", [False, True])
def test_a_question_says_whether_a_thread_waits_by_now(script: Script, reads: bool) -> None:
    ask = script.read if reads else script.wait
    ask(script.run(F)[0])
    made = script.run(F)
    note = script.value_asked_with_run() if reads else script._asked_with_run()
    assert note is not None
    assert note.ahead is not None
    assert not note.ahead.is_waited_for
    ask(made[0])
    assert note.ahead.is_waited_for


def test_large_values_are_not_asked_for_ahead(script: Script) -> None:
    large = ArraySpec((INLINE_BYTES,), "float32", Sharding((), ()), Placement(1, (0,)))
    for _ in range(2):
        made = script.run(F)
        assert script.value_asked_with_run() is None
        script.runtime.fetch(made[0], large)


@pytest.mark.parametrize("here", [False, True])
def test_a_run_asks_for_an_upload_that_it_reads_if_it_may_wait(
    script: Script, monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    """The thread of the session cannot wait: it is the one that sends the value."""
    runtime = script.runtime
    array = runtime.upload(np.zeros(4, np.float32), SPEC)
    monkeypatch.setattr(runtime.thread.leases, "unknown", lambda program, args: [array])
    monkeypatch.setattr(runtime.thread, "is_here", lambda: here)
    notes = runtime.thread.notes  # type: ignore[attr-defined]
    notes.clear()
    runtime.run(F, [array], 1)
    asked = [note.arrays for note in notes if isinstance(note, Await)]
    assert asked == ([] if here else [((array, SPEC),)])


def test_so_many_are_asked_for_ahead_at_most(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "MOST_AHEAD", 2)
    older = [script.run(F) for _ in range(6)]
    made = []
    for array, *_ in older:
        script.wait(array)
        made.append(script.run(F)[0])
    assert [script.wait(array)[1] for array in made] == [True, True, True, True, False, False]


def test_the_result_that_was_waited_for_last_counts(script: Script) -> None:
    made = script.run(F)
    for array in made:
        script.wait(array)
    for _ in range(2):
        made = script.run(F)
        assert script.asked_with_run() == [made[2]]
        assert [script.wait(array)[1] for array in made] == [True, True, False]


def test_a_question_that_has_failed_is_asked_again(script: Script) -> None:
    script.wait(script.run(F)[0])
    made = script.run(F)
    script.settle(HostLost("a host was lost"))
    future, is_own = script.wait(made[0])
    assert is_own
    assert not future.done()


def test_a_released_program_leaves_nothing(script: Script) -> None:
    script.wait(script.run(F)[0])
    made = script.run(F)
    script.runtime.release_program(F)
    script.runtime.tick()
    script.run(F)
    assert script.asked_with_run() == []
    assert script.wait(made[0])[1]


def test_programs_that_were_released_before_a_wait_do_not_gather(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "PROGRAMS", 2)
    for program in range(5):
        made = script.run(program)
        script.runtime.release_program(program)
        script.runtime.tick()
        script.wait(made[0])
    script.run(4)
    assert script.asked_with_run() != []
    script.run(0)
    assert script.asked_with_run() == []
