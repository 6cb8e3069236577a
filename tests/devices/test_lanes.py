"""Work of several clients on one host: each in its order, gangs after all, and no work waits for more."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from pw.devices.host.lanes import Lanes


@dataclass(eq=False)
class Work:
    client: int
    together: bool
    ready: bool
    done: bool = False


arrivals = st.tuples(st.integers(0, 2), st.booleans(), st.booleans())
# A piece of work that comes, or the one of those that wait which becomes ready.
events = st.lists(arrivals | st.integers(0, 9), max_size=40)


@given(events)
def test_work_waits_for_what_it_must_and_for_nothing_else(
    happens: list[tuple[int, bool, bool] | int],
) -> None:
    came: list[Work] = []
    passed: list[Work] = []

    def go(work: Work) -> bool:
        if work.ready:
            assert not work.done
            work.done = True
        return work.ready

    lanes = Lanes(go, passed.append)
    for event in happens:
        before = next(lanes.heads(), None)
        if isinstance(event, tuple):
            came.append(Work(*event))
            moved = lanes.put(event[0], came[-1], event[1])
            assert moved == (before is None and came[-1].done)
        else:
            waiting = [work for work in came if not work.ready]
            if waiting:
                waiting[event % len(waiting)].ready = True
            moved = lanes.go_on()
            assert moved == (before is not None and before.done)
        for at, work in enumerate(came):
            first = [earlier for earlier in came[:at] if not earlier.done]
            if any(work.together or earlier.client == work.client for earlier in first):
                assert not work.done
            else:
                assert work.done == work.ready
        undone = [work for work in came if not work.done]
        assert len(lanes) == len(undone)
        assert len(set(map(id, passed))) == len(passed)
        for at, work in enumerate(came):
            is_passed = any(later.done for later in came[at + 1 :] if later.client != work.client)
            assert is_passed or work not in passed
            assert work in passed or work.done or not is_passed
        heads, rest = list(lanes.heads()), list(lanes.rest())
        assert heads[:1] == undone[:1]
        assert sorted(map(id, heads + rest)) == sorted(map(id, undone))
        assert all(
            next(work for work in undone if work.client == head.client) is head for head in heads
        )
        assert len({head.client for head in heads}) == len(heads)


def test_what_has_waited_for_longest_comes_first() -> None:
    ready: set[str] = set()
    lanes: Lanes[str] = Lanes(ready.__contains__, lambda work: None)
    for client, work in ((1, "a"), (2, "b"), (3, "gang"), (1, "c")):
        assert not lanes.put(client, work, work == "gang")
    ready |= {"a"}
    assert lanes.go_on(), "it had waited for longest"
    assert list(lanes.heads()) == ["b", "gang", "c"]
    ready |= {"c", "gang"}
    assert not lanes.go_on(), "what has waited for longest waits, and the gang behind it"
    assert list(lanes.heads()) == ["b", "gang"]
    ready |= {"b"}
    assert lanes.go_on()
    assert not lanes
