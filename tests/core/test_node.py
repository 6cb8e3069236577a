"""The actor shell: mailbox, turns, timers, threads, crashes; and nodes inside one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pw.core.ids import Address
from pw.core.messages import PeerLost, Ready
from tests.stages.cluster import Cluster, Recorder, make_cluster, numbers


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Cluster]:
    yield from make_cluster("local", tmp_path, uv=False)


def test_handlers_never_run_inside_a_send(local: Cluster) -> None:
    actor = local.node("a")
    depth = []

    def react(sender: Address, message: Ready) -> None:
        depth.append("in")
        if message.request:
            actor.env.send(actor.env.address, Ready(message.request - 1))
        depth.append("out")

    actor.react = react
    actor.env.send(actor.env.address, Ready(3))
    assert not actor.received
    local.until(lambda: len(actor.received) == 4)
    assert depth == ["in", "out"] * 4
    assert actor.turns[-1] == 4


@pytest.mark.parametrize("before", range(12))
def test_the_end_of_a_peer_comes_between_its_messages(local: Cluster, before: int) -> None:
    actor = local.node("a")
    node, peer = local.of(actor), Address("b", "session")
    for number in range(before):
        node.deliver("session", Ready(number), peer)
    node.tell_all("b", PeerLost("b", "gone"))
    for number in range(before, 20):
        node.deliver("session", Ready(number), peer)
    local.until(lambda: len(actor.received) == 21)
    heard = [message for _, message in actor.received]
    assert heard.index(PeerLost("b", "gone")) == before
    assert numbers(actor) == list(range(20))


def test_a_turn_ends_once_for_all_that_came_in_it(local: Cluster) -> None:
    actor = local.node("a")
    for number in range(10):
        actor.env.send(actor.env.address, Ready(number))
    local.until(lambda: actor.turns)
    assert actor.turns == [10]


@pytest.mark.parametrize(("messages", "handled"), [(1, [1]), (2, [1, 2]), (3, [3]), (9, [9])])
def test_with_few_messages_what_one_says_does_not_wait_for_the_next(
    local: Cluster, monkeypatch: pytest.MonkeyPatch, messages: int, handled: list[int]
) -> None:
    actor = local.node("a")
    flushed: list[int] = []
    network = local.of(actor).network
    monkeypatch.setattr(network, "flush", lambda: flushed.append(len(actor.received)))
    for number in range(messages):
        actor.env.send(actor.env.address, Ready(number))
    local.until(lambda: actor.turns)
    assert flushed == handled
    assert actor.turns == [messages]


def test_an_endless_exchange_leaves_room_for_others(local: Cluster) -> None:
    actor = local.node("a")
    actor.react = lambda sender, message: actor.env.send(actor.env.address, message)
    actor.env.send(actor.env.address, Ready(0))
    fired: list[bool] = []
    local.loop.call_later(0, fired.append, True)
    local.until(lambda: fired and actor.turns)
    actor.react = lambda sender, message: None


def test_timers_fire_unless_cancelled(local: Cluster) -> None:
    actor = local.node("a")
    early = actor.env.call_later(0.001, "early")
    actor.env.call_later(0.002, "late")
    cancelled = actor.env.call_later(0.001, "cancelled")
    cancelled.cancel()
    local.until(lambda: len(actor.received) == 2)
    early.cancel()
    assert actor.received == [(actor.env.address, "early"), (actor.env.address, "late")]


def test_a_note_can_be_cancelled_while_it_waits_in_the_mailbox(local: Cluster) -> None:
    actor = local.node("a")
    timers = [actor.env.call_later(0, note) for note in ("first", "second")]
    actor.react = lambda sender, message: [timer.cancel() for timer in timers]
    local.loop.call_later(0, actor.env.send, actor.env.address, "end")
    local.until(lambda: "end" in [message for _, message in actor.received])
    assert "second" not in [message for _, message in actor.received]


def test_messages_from_threads_arrive_with_few_wakeups(local: Cluster) -> None:
    actor = local.node("a")
    node = local.of(actor)

    def work(first: int) -> None:
        for number in range(first, first + 1000):
            node.post_threadsafe("session", Ready(number))

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    local.until(lambda: len(actor.received) == 3000)
    for thread in threads:
        thread.join()
    for first in (0, 1000, 2000):
        mine = [number for number in numbers(actor) if first <= number < first + 1000]
        assert mine == list(range(first, first + 1000))


def test_pending_messages_of_a_thread_wake_the_loop_once(
    local: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = local.node("a")
    node = local.of(actor)
    wakeups = []
    original = local.loop.call_soon_threadsafe
    monkeypatch.setattr(
        local.loop,
        "call_soon_threadsafe",
        lambda *args, **kwargs: (wakeups.append(args), original(*args, **kwargs))[1],
    )
    for number in range(100):
        node.post_threadsafe("session", Ready(number))
    local.until(lambda: len(actor.received) == 100)
    assert len(wakeups) == 1


def test_a_crash_is_reported_and_the_actor_goes_on(local: Cluster) -> None:
    actor = local.node("a")
    node = local.of(actor)

    def react(sender: Address, message: object) -> None:
        raise RuntimeError(f"cannot do {message}")

    actor.react = react
    crashes: list[tuple[str, str]] = []
    actor.env.send(actor.env.address, "one")
    local.until(lambda: node.counters["actor_crashes"] == 1)
    node.on_crash = lambda name, error: crashes.append((name, str(error)))
    actor.env.send(actor.env.address, "two")
    local.until(lambda: crashes)
    assert crashes == [("session", "cannot do two")]


def test_messages_to_unknown_actors_are_counted_and_logged_once(
    local: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    actor = local.node("a")
    for _ in range(3):
        actor.env.send(Address("a", "unknown"), Ready(0))
    local.until(lambda: local.of(actor).counters["messages_undeliverable"] == 3)
    assert [record.message for record in caplog.records] == [
        "message to an unknown actor node=a actor=unknown message=Ready"
    ]


def test_actors_come_and_go(local: Cluster) -> None:
    actor = local.node("a")
    node = local.of(actor)
    with pytest.raises(ValueError, match="session"):
        node.add("session", Recorder)
    actor.env.call_later(0, "a note for the removed")
    node.remove("session")
    again = node.add("other", Recorder)
    again.env.call_later(0.005, "last")
    local.until(lambda: again.received)
    assert not actor.received
    assert node.counters["messages_undeliverable"] == 0


def test_a_node_that_is_cut_loses_what_it_said_last(local: Cluster) -> None:
    a, b = local.node("a"), local.node("b")
    b.env.send(a.env.address, Ready(0))
    local.hub.cut("b")
    b.env.send(a.env.address, Ready(1))
    local.until(lambda: a.lost)
    assert a.lost == [("b", "killed")]
    assert not numbers(a)
    again = local.node("b")
    again.env.send(a.env.address, Ready(2))
    local.until(lambda: numbers(a) == [2])
