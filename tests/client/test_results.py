"""A result that a thread has waited for is asked for together with the next run of its program."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from pw.client.connection import results
from pw.client.connection.runtime import Runtime
from pw.client.session.thread_messages import Await, Tell, reject, resolve
from pw.core.errors import HostLost
from pw.core.messages import Run
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
        tell = next(note for note in self._notes if isinstance(note, Tell))
        assert isinstance(tell.message, Run)
        return [] if tell.then is None else [array for array, _ in tell.then.arrays]

    def wait(self, array: int) -> tuple[Future[Any], bool]:
        """Wait for an array; returns the future, and whether that is a question of its own."""
        before = len(self._notes)
        future = self.runtime.wait([(array, SPEC)])
        asked = self._notes[before:]
        assert all(isinstance(note, Await) for note in asked)
        return future, bool(asked)

    def settle(self, error: Exception | None = None) -> None:
        """Answer the question that went with the newest run."""
        tell = next(note for note in self._notes if isinstance(note, Tell))
        assert tell.then is not None
        if error is None:
            resolve(tell.then.ready, None)
        else:
            reject(tell.then.ready, error)


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


def test_only_results_of_the_newest_run_of_a_program_count(script: Script) -> None:
    older = script.run(F)
    script.run(F)
    assert script.wait(older[0])[1]
    script.run(F)
    assert script.asked_with_run() == []


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
