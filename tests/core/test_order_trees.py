"""Orders to large gangs: one message has all numbers, and reaches each host once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pw.core import messages as msg
from pw.sched.island.numbers import Numbers


@given(st.integers(1, 300), st.integers(1, 9))
def test_each_host_of_a_tree_gets_an_order_from_its_parent_once(size: int, fan: int) -> None:
    reached = []
    waiting = list(msg.children_of(-1, fan, size))
    assert all(msg.parent_of(position, fan) == -1 for position in waiting)
    while waiting:
        position = waiting.pop()
        reached.append(position)
        children = msg.children_of(position, fan, size)
        assert len(children) <= fan
        assert all(msg.parent_of(child, fan) == position for child in children)
        waiting += children
    assert sorted(reached) == list(range(size))


@st.composite
def orders(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """An island, and the ranks that each order goes to."""
    hosts = draw(st.integers(1, 12))
    ranks = st.lists(st.integers(0, hosts - 1), min_size=1, unique=True)
    near = st.builds(
        lambda first, last: list(range(min(first, last), max(first, last) + 1)),
        st.integers(0, hosts - 1),
        st.integers(0, hosts - 1),
    )
    return hosts, draw(st.lists(near | ranks, max_size=20))


@given(orders())
def test_the_numbers_of_a_gang_are_those_of_its_hosts_one_by_one(
    case: tuple[int, list[list[int]]],
) -> None:
    count, gangs = case
    hosts = tuple(f"h{rank}" for rank in range(count))
    numbers, expected = Numbers(hosts), dict.fromkeys(hosts, 0)
    for at, ranks in enumerate(gangs):
        named = tuple(hosts[rank] for rank in ranks)
        if at % 3 == 2:
            got = {host: numbers.take(host) for host in named}
        else:
            gang = numbers.gang(named)
            assert gang is not None
            spans = numbers.take_all(gang)
            assert msg.size_of(spans) == len(ranks)
            for position, rank in enumerate(ranks):
                assert msg.at_position(spans, position) == (rank, expected[hosts[rank]])
                assert msg.place_of(spans, rank) == (position, expected[hosts[rank]])
            assert all(msg.place_of(spans, rank) is None for rank in set(range(count)) - {*ranks})
            got = {hosts[rank]: msg.at_position(spans, at)[1] for at, rank in enumerate(ranks)}
        assert got == {host: expected[host] for host in named}
        for host in named:
            expected[host] += 1


def test_a_gang_of_equal_hosts_has_one_span() -> None:
    hosts = tuple(f"h{rank}" for rank in range(4096))
    numbers = Numbers(hosts)
    gang = numbers.gang(hosts[512:])
    assert gang is not None
    assert gang is numbers.gang(tuple(reversed(hosts[:511:-1]))), "another tuple of the same hosts"
    assert numbers.take_all(gang) == (msg.Span(512, 3584, 0),)
    assert numbers.take("h600") == 1
    assert numbers.take_all(gang) == (
        msg.Span(512, 88, 1),
        msg.Span(600, 1, 2),
        msg.Span(601, 3495, 1),
    )
    assert numbers.gang((*hosts, "another")) is None
