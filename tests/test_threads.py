"""The thread of a session, and how it gets its turn beside those of the user."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from pw.client.threads import SWITCH_INTERVAL_S, LoopThread


@pytest.fixture
def interval() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before_s)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever sessions other tests have left."""
    monkeypatch.setattr(LoopThread, "_living", set())


def test_threads_take_turns_more_often_while_there_is_a_session(
    interval: None, alone: None
) -> None:
    sys.setswitchinterval(0.004)
    first, second = LoopThread("first"), LoopThread("second")
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    first.stop()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    second.stop()
    assert sys.getswitchinterval() == pytest.approx(0.004)


@pytest.mark.parametrize("chosen_s", [0.0001, 0.003])
def test_an_interval_that_the_user_has_chosen_stays(
    interval: None, alone: None, chosen_s: float
) -> None:
    thread = LoopThread("session")
    sys.setswitchinterval(chosen_s)
    thread.stop()
    assert sys.getswitchinterval() == pytest.approx(chosen_s)
    sys.setswitchinterval(0.0001)
    other = LoopThread("session")
    assert sys.getswitchinterval() == pytest.approx(0.0001)
    other.stop()
    assert sys.getswitchinterval() == pytest.approx(0.0001)
