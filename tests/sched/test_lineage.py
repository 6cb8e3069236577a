"""What is kept of how arrays were made, and how lost ones are had back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pw.core.errors import ErrorReport
from pw.core.ids import session_of
from pw.core.messages import BoxSource, OfferSource
from pw.core.programs.program import Kind, Output, Program, ValueRef
from pw.sched.control.array_states import ArrayEntry, ArrayTable
from pw.sched.control.clients import Client
from pw.sched.control.lineage import ATTEMPTS, Lineage, Record
from pw.sched.control.programs import RegisteredProgram
from pw.sched.control.recovery.plan import RecoveryPlan, plan_recovery
from tests.stages.scripted import chain, split

SPEC = split(1, 2)
LEFT, RIGHT = SPEC.box(0), SPEC.box(1)
X = b"x" * 64
WHY = ErrorReport("HostLost", "h was lost")


def program(body: Program | None = None) -> RegisteredProgram:
    return RegisteredProgram(7, body or chain([SPEC]), ())


class History:
    """Runs of one program, numbered, each making one array that is called like its run."""

    def __init__(self, **options: Any) -> None:
        self.lineage = Lineage(**options)
        self.lost: set[int] = set()

    def run(self, number: int, arg: int | bytes = X, *, donate: bool = False) -> Record:
        record = self.lineage.add_run(number, program(), (arg,), (number,))
        if donate:
            assert isinstance(arg, int)
            self.lineage.release([arg])
        return record

    def plan(
        self,
        *lost: int,
        copies: Any = None,
        exist: tuple[int, ...] = (),
        bound: Callable[[int], bool] = lambda slice: True,
        **others: Any,
    ) -> RecoveryPlan:
        arrays = ArrayTable()
        for number in (*lost, *exist):
            arrays.add(number, ArrayEntry(SPEC, "i", ("h",)))
        for number in lost:
            arrays.lose(number, WHY)
        return plan_recovery(self.lineage, arrays, copies or {}, bound, **others)


def orders(plan: RecoveryPlan) -> list[int]:
    return [record.order for record in plan.runs]


def test_a_donated_chain_is_kept_as_far_back_as_its_end_needs_it() -> None:
    history = History()
    history.run(1)
    for number in range(2, 2000):
        history.run(number, number - 1, donate=True)
    assert len(history.lineage) == 1999
    assert orders(history.plan(1999)) == list(range(1, 2000))
    history.lineage.release([1999])
    assert not history.lineage.origins, "none of it is needed"
    assert not len(history.lineage)
    assert set(history.lineage.drain().arrays) == set(range(1, 2000))


def test_a_checkpoint_ends_lineage_and_is_kept_while_somebody_needs_it() -> None:
    history = History()
    history.lineage.add_input(1, SPEC)
    history.run(2, 1)
    history.run(3, 2, donate=True)
    history.lineage.release([1])
    history.lineage.replicated(3)
    assert len(history.lineage) == 0
    assert history.lineage.drain().inputs == [1]
    history.run(4, 3, donate=True)
    assert 3 in history.lineage.origins, "4 is made of it"
    copies = {3: {"a": frozenset([LEFT]), "b": frozenset([LEFT, RIGHT])}}
    plan = history.plan(4, copies=copies)
    assert orders(plan) == [4]
    assert plan.restores == {3: (BoxSource(LEFT, "a"), BoxSource(LEFT, "b"), BoxSource(RIGHT, "b"))}
    assert not plan.lost
    assert not plan.uploads
    history.lineage.replicated(4)
    assert 3 in history.lineage.drain().arrays, "the newer checkpoint does without the older"


def test_it_knows_the_slices_of_what_can_be_made_again() -> None:
    lineage = Lineage(records_kept=2)
    there, back = (RegisteredProgram(n, chain([split(1, 2), split(n, 2)]), ()) for n in (2, 3))
    lineage.add_run(1, there, (X,), (1,))
    lineage.add_run(2, back, (1,), (2,))
    lineage.release([1])
    assert [lineage.touches(slice) for slice in (1, 2, 3, 4)] == [True, True, True, False]
    assert not lineage.drain().slices
    lineage.add_run(3, back, (2,), (3,))
    assert lineage.drain().slices == [2], "the first run is kept no longer"
    lineage.release([2, 3])
    assert sorted(lineage.drain().slices) == [1, 3]
    assert not any(map(lineage.touches, (1, 2, 3)))


def test_what_reads_an_array_of_another_client_is_run_again_once_that_one_makes_it() -> None:
    history = History()
    history.lineage.add_input(1, SPEC, OfferSource(bytes(16), 0))
    history.lineage.add_input(2, SPEC)
    for number, arg in ((3, 1), (4, 3), (5, 2), (6, X)):
        history.run(number, arg)
    history.lineage.release([1, 2])
    plan = history.plan(4, 5, 6)
    assert (orders(plan), sorted(plan.uploads)) == ([5, 6], [1, 2])
    plan = history.plan(4, is_asked=lambda array: array == 1, brought=[1])
    assert (orders(plan), plan.uploads, plan.lost) == ([], [], {})
    plan = history.plan(4, brought=[1])
    assert (orders(plan), plan.uploads, plan.lost) == ([3, 4], [], {})
    assert history.plan(4, can_bring=lambda array: False).lost.keys() == {1, 3, 4}
    history.lineage.origins[1].error = WHY
    assert history.plan(4).lost == dict.fromkeys((1, 3, 4), WHY)


def test_what_was_on_a_slice_that_cannot_be_had_again_is_lost() -> None:
    history = History()
    body = chain([SPEC])
    aside = Program(
        "two",
        body.computations,
        body.nodes,
        body.inputs,
        (*body.outputs, Output(ValueRef(0, 0), split(9, 2))),
    )
    history.lineage.add_run(1, program(aside), (X,), (1, 2))
    history.lineage.release([2])
    plan = history.plan(1, bound=lambda slice: slice != 9)
    assert not plan.runs
    assert "given back" in plan.lost[1].message


def test_what_exists_is_not_made_again() -> None:
    history = History()
    history.run(1)
    history.run(2, 1)
    history.run(3, 2)
    assert orders(history.plan(3, exist=(1, 2))) == [3]
    assert orders(history.plan(3, exist=(1,))) == [2, 3]
    assert orders(history.plan(2, 3)) == [1, 2, 3]


def test_inputs_are_asked_for_again() -> None:
    history = History()
    history.lineage.add_input(1, SPEC)
    history.run(2, 1)
    plan = history.plan(2)
    assert plan.uploads == [1]
    assert orders(plan) == [2]


def test_a_copy_that_lacks_a_box_is_no_copy() -> None:
    history = History()
    history.run(1)
    assert orders(history.plan(1, copies={1: {"a": frozenset([LEFT])}})) == [1]
    history.lineage.replicated(1)
    (error,) = history.plan(1, copies={1: {"a": frozenset([LEFT])}}).lost.values()
    assert error.kind == "ArrayLost"
    assert "h was lost" in error.message
    assert "pw.checkpoint" in error.message


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    history = History(records_kept=10)
    for number in range(1, 51):
        history.run(number, number - 1 if number > 1 else X, donate=number > 1)
    assert len(history.lineage) == 10
    assert len(history.lineage.origins) == 11
    assert [*history.plan(50).lost] == [40, *range(41, 51)]
    assert orders(history.plan(50, exist=(40,))) == list(range(41, 51))
    large = History(values_kept=20)
    for number in range(1, 51):
        large.run(number)
    assert len(large.lineage) == 10
    large.lineage.release(range(45, 51))
    large.run(51)
    assert len(large.lineage) == 5
    large.lineage.add_run(52, program(), (X,) * 30, (52,))
    assert not len(large.lineage), "too much for all that may be kept"
    heavy = History(values_kept=1000)
    for number in range(1, 51):
        heavy.run(number, b"x" * 8192)
    assert len(heavy.lineage) == 1000 // (8192 // 256 + 2)
    doubled = History(values_kept=1)
    body = chain([SPEC])
    twice = Program("twice", body.computations, body.nodes, body.inputs, body.outputs * 2)
    doubled.lineage.add_run(1, program(twice), (X,), (1, 1))
    assert not len(doubled.lineage)
    kept_apart = History(records_kept=2)
    for number in (1, 2, 3):
        kept_apart.run(number)
    assert not kept_apart.plan(3).lost
    assert [*kept_apart.plan(1).lost] == [1]


def test_python_functions_are_not_run_again() -> None:
    import msgspec

    body = chain([SPEC])
    impure = msgspec.structs.replace(
        body, computations=(msgspec.structs.replace(body.computations[0], kind=Kind.PYTHON),)
    )
    history = History()
    history.lineage.add_run(1, program(impure), (X,), (1,))
    history.run(2, 1)
    plan = history.plan(2)
    assert not plan.runs
    assert "Python function" in plan.lost[2].message


def test_a_run_that_is_always_lost_again_is_given_up() -> None:
    history = History()
    record = history.run(1)
    record.attempts, record.attempted_s = ATTEMPTS, 0.0
    assert "lost again" in history.plan(1).lost[1].message


@pytest.mark.parametrize("donated", [False, True])
def test_two_results_keep_their_run_until_both_are_gone(donated: bool) -> None:
    lineage = Lineage()
    body = chain([SPEC])
    two = RegisteredProgram(
        7, Program("two", body.computations, body.nodes, body.inputs, body.outputs * 2), ()
    )
    lineage.add_run(1, two, (X,), (1, 2))
    lineage.release([1])
    assert len(lineage) == 1
    if donated:
        lineage.add_run(3, program(), (2,), (3,))
    lineage.release([2])
    assert len(lineage) == (2 if donated else 0)


def test_what_is_made_of_a_failed_array_fails_like_it_though_it_was_deleted_meanwhile() -> None:
    """A client of an earlier controller has told of both; the lost one waits for its island."""
    client = Client(session_of("client"), 1, "client")
    client.lineage.add_known(1, SPEC)
    client.arrays.add(1, ArrayEntry.failed(WHY))
    client.lineage.add_run(2, program(), (1,), (2,))
    client.arrays.add(2, ArrayEntry(SPEC, "i", ("h",)))
    client.arrays.lose(2, ErrorReport("HostLost", "the controller was started again"))
    client.delete((1,))
    assert plan_recovery(client.lineage, client.arrays, {}).lost[2] == WHY
