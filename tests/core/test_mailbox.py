"""The mailbox: whose message is next, and which peers are held."""

from __future__ import annotations

from collections import Counter

from pw.core.actors import mailbox as module
from pw.core.actors.mailbox import CREDIT_S, WORKERS_CREDIT_S, Mailbox


def put(box: Mailbox, node: str, *numbers: int) -> None:
    for number in numbers:
        box.deliver(node, ("actor", None, (node, number)))


def taken(box: Mailbox, count: int, cost_s: float = CREDIT_S) -> list[tuple[str, int]]:
    """Take messages of which each takes so long."""
    messages: list[tuple[str, int]] = []
    for step in range(count):
        entry = box.own.popleft() if box.own else box.take(step * cost_s)
        if entry is None:
            break
        messages.append(entry[2])  # type: ignore[arg-type]
    box.end(count * cost_s)
    return messages


def test_each_peer_is_heard_in_order_and_in_turn() -> None:
    box = Mailbox()
    put(box, "client-a", *range(5))
    put(box, "client-b", *range(2))
    assert len(box) == 7
    heard = taken(box, 9)
    assert [number for node, number in heard if node == "client-a"] == list(range(5))
    assert [number for node, number in heard if node == "client-b"] == list(range(2))
    assert [node[-1] for node, _ in heard] == list("ababaaa")
    assert not box


def test_a_peer_that_was_silent_goes_before_one_that_has_used_its_credit() -> None:
    box = Mailbox()
    put(box, "client-a", *range(100))
    taken(box, 3)
    put(box, "client-b", 0)
    assert taken(box, 1) == [("client-b", 0)]


def test_groups_share_time_and_not_messages() -> None:
    box = Mailbox()
    put(box, "client-a", *range(1000))
    put(box, "client-b", *range(1000))
    spent: Counter[str] = Counter()
    now_s = 0.0
    for _ in range(400):
        entry = box.take(now_s)
        assert entry is not None
        node = entry[2][0]  # type: ignore[index]
        cost_s = 8e-4 if node == "client-a" else 5e-5
        spent[node] += round(cost_s * 1e6)
        now_s += cost_s
    assert 0.9 < spent["client-a"] / spent["client-b"] < 1.1


def test_a_host_has_more_credit_than_a_client() -> None:
    box = Mailbox()
    put(box, "client-a", *range(2000))
    put(box, "host-0", *range(2000))
    heard = Counter(node for node, _ in taken(box, 1200, CREDIT_S / 4))
    ratio = WORKERS_CREDIT_S / CREDIT_S
    assert 0.9 * ratio < heard["host-0"] / heard["client-a"] < 1.1 * ratio


def test_many_peers_of_one_group_have_the_share_of_one() -> None:
    box = Mailbox(lambda node: node.partition(".")[0])
    for number in range(10):
        put(box, f"client-a.{number}", *range(100))
    put(box, "client-b.0", *range(100))
    heard = taken(box, 100)
    assert 45 < sum(node == "client-b.0" for node, _ in heard) < 55
    others = Counter(node for node, _ in heard if node != "client-b.0")
    assert max(others.values()) - min(others.values()) <= 1


def test_a_peer_is_held_until_half_of_its_messages_are_handled() -> None:
    box = Mailbox()
    put(box, "client-a", *range(10))
    put(box, "client-b", *range(10))
    assert not box.holds("client-a", 10)
    assert not box.holds("client-c", 0)
    assert box.holds("client-a", 8)
    taken(box, 11)
    assert not box.to_resume
    taken(box, 1)
    assert box.to_resume == ["client-a"]
    assert box.holds("client-b", 0)
    taken(box, 8)
    assert box.to_resume == ["client-a", "client-b"]


def test_where_no_others_wait_messages_are_taken_together_unless_they_take_long() -> None:
    for cost_s, together in ((1e-6, 8), (1e-2, 1)):
        box = Mailbox()
        put(box, "client-a", *range(60))
        taken(box, 40, cost_s)
        while box.own:
            box.own.popleft()
        left = len(box)
        assert box.take(1.0)
        assert left - box.waiting == together
        put(box, "client-b", 0)
        while box.own:
            box.own.popleft()
        assert box.take(2.0) == ("actor", None, ("client-b", 0))


def test_peers_that_have_gone_are_forgotten() -> None:
    box = Mailbox()
    for number in range(3 * module.QUEUES_KEPT):
        put(box, f"client-{number}", number)
        assert taken(box, 1) == [(f"client-{number}", number)]
    assert len(box.queues) <= module.QUEUES_KEPT
    assert len(box.groups) <= module.QUEUES_KEPT
