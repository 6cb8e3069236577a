"""The thread of a session, and how it gets its turn beside those of the user."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pw.client.connection.threads import SWITCH_INTERVAL_S, LoopThread, SessionOnNode
from pw.client.connection.wires import LocalWires
from pw.client.session.requests import Requests
from pw.client.session.thread_messages import Forget
from pw.core.actors.actor import Actor, handles
from pw.core.errors import Disconnected, InternalError
from pw.core.ids import CONTROLLER, Address
from pw.testing import InProcessCluster
from pw.transport.bulk.plane import BulkPlane
from pw.transport.links.local import LocalHub, LocalNetwork
from pw.transport.links.node import Node


@pytest.fixture
def interval() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before_s)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever sessions other tests have left."""
    monkeypatch.setattr(LoopThread, "living", set())


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


def test_what_is_posted_in_a_hurry_is_handled_at_once_but_not_within_a_turn() -> None:
    thread = LoopThread("session")
    came: list[str] = []

    class Noting(Actor):
        @handles(str)
        def _on_note(self, sender: Address, note: str) -> None:
            if note == "first":
                node.post("noting", "third")
                node.turn_now()
            came.append(note)

    def act() -> list[str]:
        node.post("noting", "first")
        node.post("noting", "second")
        before = list(came)
        node.turn_now()
        return before + came

    node = thread.call(lambda: Node("one", thread.loop, LocalHub(thread.loop).network("one")))
    thread.call(lambda: node.add("noting", Noting))
    try:
        assert thread.call(act) == ["first", "second", "third"]
    finally:
        thread.call(node.close)
        thread.stop()


def test_a_session_that_breaks_ends_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits for an answer would wait for ever."""

    def broken(requests: Requests, arrays: object) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(Requests, "forget", broken)
    forgotten: list[str] = []
    monkeypatch.setattr(LocalNetwork, "forget", lambda network, node: forgotten.append(node))
    cluster = InProcessCluster(1, 1)
    runtime = cluster.client()
    runtime.thread.post(Forget((1,)))
    with pytest.raises(InternalError, match="KeyError: 'broken'"):
        runtime.ask.status()
    assert CONTROLLER in forgotten, "the cluster is told, and lets go of what the client had"
    with pytest.raises(AssertionError, match="actors crashed"):
        cluster.close()


def test_counters_are_read_where_the_session_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """To count its segments the bulk plane takes them back, and tells those who sent them."""
    asked: list[int] = []
    real = BulkPlane.counters

    def counters(plane: BulkPlane) -> dict[str, int]:
        asked.append(threading.get_ident())
        return real(plane)

    monkeypatch.setattr(BulkPlane, "counters", counters)
    thread = LoopThread("session")
    runtime = cast(
        Any,
        SimpleNamespace(
            tick=lambda: None,
            grant=None,
            session_ended=None,
            lock=threading.RLock(),
            calls=SimpleNamespace(arrived=None),
            island_readers=SimpleNamespace(changed=None),
        ),
    )

    def make() -> SessionOnNode:
        hub = LocalHub(thread.loop)
        node = Node("client", thread.loop, hub.network("client"))
        return SessionOnNode(
            thread,
            node,
            BulkPlane(thread.loop),
            runtime,
            None,
            thread.stop,
            lambda lines: LocalWires(thread.loop, hub, lines, node.counters),
        )

    session = thread.call(make)
    assert session.counters()["bulk_lent_blocks"] == 0
    assert asked == [thread.call(threading.get_ident)]
    session.close()
    with pytest.raises(Disconnected):
        session.counters()
    assert len(asked) == 1
