"""What proves a computation quick, and what does not."""

from __future__ import annotations

import pytest

from pw.devices.jax.quick import CALLS, CLOCK_S, LONG_S, PROCESSOR_S, SOON_S, Quick

KEY = b"k"


def tried(quick: Quick, *calls: tuple[float, float, bool]) -> None:
    """Calls on trial: processor time, time on the clock, and whether it had ended."""
    for processor_s, clock_s, ended in calls:
        assert KEY in quick.trials
        assert KEY not in quick.proven
        quick.tried(KEY, processor_s, clock_s, ended=ended)


FAST = (PROCESSOR_S / 2, CLOCK_S / 2, True)
UNLUCKY = (PROCESSOR_S * 100, CLOCK_S * 100, True)


@pytest.mark.parametrize(
    ("calls", "is_quick"),
    [
        ([FAST] * CALLS, True),
        ([UNLUCKY] * (CALLS - 1) + [FAST], True),
        ([UNLUCKY] * CALLS, False),
        ([FAST] * (CALLS - 1) + [(*FAST[:2], False)], False),
        ([(PROCESSOR_S / 2, CLOCK_S * 2, True)] * CALLS, False),
        ([(PROCESSOR_S * 2, CLOCK_S / 2, True)] * CALLS, False),
    ],
)
def test_a_trial(calls: list[tuple[float, float, bool]], is_quick: bool) -> None:
    quick = Quick()
    quick.try_out(KEY, (0,))
    tried(quick, *calls)
    assert (KEY in quick.proven) == is_quick
    assert KEY not in quick.trials, "it is known now"


def test_what_takes_long_all_the_same_is_on_trial_again() -> None:
    quick = Quick()
    quick.try_out(KEY, (0,))
    tried(quick, *[FAST] * CALLS)
    quick.took(KEY, LONG_S / 2)
    assert KEY in quick.proven
    quick.took(KEY, LONG_S * 2)
    tried(quick, *[FAST] * CALLS)
    assert KEY in quick.proven


def test_a_key_that_is_forgotten_or_installed_again_has_proven_nothing() -> None:
    quick = Quick()
    for _ in range(2):
        quick.try_out(KEY, (0,))
        tried(quick, *[FAST] * CALLS)
    quick.forget(KEY)
    assert KEY not in quick.proven
    assert KEY not in quick.trials
    assert b"another" not in quick.trials


def test_what_comes_one_after_the_other_does_not_come_alone() -> None:
    quick = Quick()
    assert quick.comes_alone(5.0)
    assert not quick.comes_alone(5.0 + SOON_S / 2)
    assert not quick.comes_alone(5.0 + SOON_S)
    assert quick.comes_alone(5.0 + 3 * SOON_S)
