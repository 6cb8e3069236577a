"""`pw.island_events()` and `pw.on_island_event()`: a script learns that islands join, leave and return."""

from __future__ import annotations

from collections.abc import Callable

from pw.client.connection import current
from pw.client.connection.island_events import IslandCallback, IslandEvent, IslandEvents
from pw.client.keywords import checks_keywords

__all__ = ["IslandCallback", "IslandEvent", "IslandEvents", "island_events", "on_island_event"]


def island_events() -> IslandEvents:
    """Return what happens to islands, for `async for`; the controller tells it, so nothing polls.

        async for event in pw.island_events():
            print(event.island, event.what, event.devices)

    First comes the present state of each island, as an event with `is_present`. Then each change comes once, in
    the order in which the controller saw it. There are two exceptions, and after them the last event of each
    island still says how it is now. If more than 256 events wait for a slow reader, it gets the present state
    of each island in their place, with `is_present`. If the controller is started again, all that happened to
    an island before this session is attached again is one event.

    A slow reader holds up nothing else, and each of several readers gets all events. They end with the session.

    Returns:
        An asynchronous iterator, for one coroutine. `close()`, or the end of a `with` block, ends it.

    Raises:
        ConnectionFailed: as `pw.connect`; also in the loop, if the controller is lost and does not come back.
    """
    readers = current.runtime().island_readers
    events = IslandEvents(readers)
    readers.add(events)
    return events


@checks_keywords
def on_island_event(callback: Callable[[IslandEvent], object]) -> IslandCallback:
    """Call a function with each event of `pw.island_events`, until the result is closed.

        with pw.on_island_event(lambda event: print(event.island, event.what)):
            train()

    All calls are made in one thread that belongs to this registration, one after the other. The function may
    call `pw`, and take its time: only its own next call waits. If it raises, the error is logged, with the line
    of the script, and the next event comes all the same.

    Args:
        callback: called with an `IslandEvent`.

    Returns:
        The registration. `close()`, or the end of a `with` block, ends it; so does the end of the session.

    Raises:
        ConnectionFailed: as `pw.connect`.
    """
    readers = current.runtime().island_readers
    registration = IslandCallback(readers, callback)
    readers.add(registration)
    registration.start()
    return registration
