"""What scripts hear of islands: `pw.island_events` and `pw.on_island_event`."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import pw
from pw.client.connection.island_events import KEPT, IslandCallback, IslandEvents, IslandReaders
from pw.client.session.island_news import IslandChange
from pw.client.session.thread_messages import FollowIslands
from pw.core.errors import ConnectionFailed
from pw.core.messages import IslandState
from pw.testing import InProcessCluster
from tests.stages.daemons import Program, until
from tests.stages.stage import BOUND_S


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, BOUND_S))


async def some(events: AsyncIterator[pw.IslandEvent], count: int) -> list[pw.IslandEvent]:
    return [await anext(events) for _ in range(count)]


class Readers(IslandReaders):
    """Readers of a session that the test plays."""

    def __init__(self) -> None:
        self.notes: list[Any] = []
        super().__init__(self.notes.append)

    def tell(self, what: Any, epoch: int, island: str = "a") -> None:
        """Tell all readers of a change."""
        is_ready = what in ("joined", "returned")
        self.changed(IslandChange(what, IslandState(island, epoch, is_ready, devices=4)))

    def events(self) -> IslandEvents:
        events = IslandEvents(self)
        self.add(events)
        return events

    def callback(self, function: Callable[[pw.IslandEvent], object]) -> IslandCallback:
        registration = IslandCallback(self, function)
        self.add(registration)
        registration.start()
        return registration


def test_the_session_watches_while_there_is_a_reader() -> None:
    readers = Readers()
    one, two = readers.events(), readers.events()
    assert readers.notes == [FollowIslands(is_on=True)]
    one.close()
    one.close()
    assert len(readers.notes) == 1
    with two:
        readers.tell("joined", 1)
    assert readers.notes[1:] == [FollowIslands(is_on=False)]
    assert run(_all(two)) == []


async def _all(events: AsyncIterator[pw.IslandEvent]) -> list[pw.IslandEvent]:
    return [event async for event in events]


def test_a_reader_that_no_code_has_any_more_is_forgotten() -> None:
    readers = Readers()
    readers.events()
    gc.collect()
    readers.tell("joined", 1)
    assert readers.notes[1:] == [FollowIslands(is_on=False)]


def test_a_reader_begins_with_the_present_states() -> None:
    readers = Readers()
    first = readers.events()
    for epoch in range(1, 4):
        readers.tell("joined" if epoch == 1 else "returned", epoch)
    readers.tell("left", 7, "b")
    second = readers.events()
    (a, b) = run(some(second, 2))
    assert (a.island, a.what, a.epoch, a.is_ready, a.is_present) == ("a", "returned", 3, True, True)
    assert (b.island, b.what, b.epoch, b.is_ready, b.is_present) == ("b", "left", 7, False, True)
    assert [event.epoch for event in run(some(first, 4))] == [1, 2, 3, 7]


def test_a_slow_reader_gets_the_present_states_for_what_it_has_missed() -> None:
    readers = Readers()
    slow, quick = readers.events(), readers.events()
    readers.tell("joined", 1, "b")
    for epoch in range(1, 2 * KEPT):
        readers.tell("returned", epoch)
        if epoch == 1:
            assert len(run(some(quick, 2))) == 2
    assert len(slow.queue) <= KEPT
    events = run(some(slow, len(slow.queue)))
    present = [(event.island, event.epoch) for event in events if event.is_present]
    assert [island for island, _ in present] == ["b", "a"]
    missed_until = present[1][1]
    assert [event.epoch for event in events[2:]] == list(range(missed_until + 1, 2 * KEPT))


def test_a_coroutine_that_waits_goes_on() -> None:
    readers = Readers()
    events = readers.events()

    async def wait() -> pw.IslandEvent:
        waiting = asyncio.create_task(some(events, 1))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="waits for the next"):
            await anext(events)
        threading.Thread(target=readers.tell, args=("joined", 1)).start()
        return (await waiting)[0]

    assert run(wait()).what == "joined"


def test_a_loop_that_is_closed_in_a_wait_holds_up_nothing() -> None:
    readers = Readers()
    events = readers.events()
    loop = asyncio.new_event_loop()
    waiting = events.__anext__()
    task = loop.create_task(waiting)  # type: ignore[arg-type]
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    readers.tell("joined", 1)
    assert run(some(readers.events(), 1))[0].epoch == 1
    assert len(events.queue) == 1
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_the_end_of_the_session_ends_the_events() -> None:
    readers = Readers()
    events = readers.events()
    readers.tell("joined", 1)
    readers.end(ConnectionFailed("the controller was lost"))
    assert run(some(events, 1))[0].what == "joined"
    with pytest.raises(ConnectionFailed, match="the controller was lost"):
        run(some(events, 1))


def test_no_event_is_read_after_the_end_of_the_script() -> None:
    readers, go_on, begun = Readers(), threading.Event(), threading.Event()
    heard: list[threading.Thread] = []

    def slow(event: pw.IslandEvent) -> None:
        heard.append(threading.current_thread())
        begun.set()
        assert go_on.wait(BOUND_S)

    events, _registration = readers.events(), readers.callback(slow)
    readers.tell("joined", 1)
    readers.tell("left", 1)
    assert begun.wait(BOUND_S)
    readers.end(None)
    go_on.set()
    until(lambda: not heard[0].is_alive(), "the end of the thread")
    assert len(heard) == 1
    assert run(_all(events)) == []


def test_an_error_of_a_callback_is_logged_and_loses_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    readers, heard = Readers(), []
    threads = set()

    def fragile(event: pw.IslandEvent) -> None:
        heard.append(event.epoch)
        threads.add(threading.current_thread())
        if event.epoch == 2:
            raise ValueError("the script's own error")

    with caplog.at_level(logging.WARNING), readers.callback(fragile):
        for epoch in (1, 2, 3):
            readers.tell("returned", epoch)
        until(lambda: len(heard) == 3, "all calls")
    assert heard == [1, 2, 3]
    (thread,) = threads
    assert thread is not threading.current_thread()
    (record,) = caplog.records
    assert record.name == __name__
    assert f"fragile ({__file__}:{fragile.__code__.co_firstlineno})" in record.getMessage()
    (line,) = [line for line in caplog.text.splitlines() if "in fragile" in line]
    assert __file__ in line
    until(lambda: not thread.is_alive(), "the end of the thread")


def test_a_slow_callback_holds_up_no_other_reader() -> None:
    readers, go_on, heard = Readers(), threading.Event(), []

    def slow(event: pw.IslandEvent) -> None:
        assert go_on.wait(BOUND_S)
        heard.append(event.epoch)

    events = readers.events()
    with readers.callback(slow):
        for epoch in (1, 2):
            readers.tell("returned", epoch)
        assert [event.epoch for event in run(some(events, 2))] == [1, 2]
        go_on.set()
        until(lambda: heard == [1, 2], "both calls")


def test_the_islands_of_a_cluster() -> None:
    with InProcessCluster(islands=2, devices_per_island=2):
        with pw.island_events() as events:
            heard = run(some(events, 2))
        assert sorted((one.island, one.what, one.epoch, one.devices) for one in heard) == [
            ("island-0", "joined", 1, 2),
            ("island-1", "joined", 1, 2),
        ]
        assert {one.hosts for one in heard} == {("host-0",), ("host-1",)}
        with pytest.raises(pw.ArgumentError, match="callback"):
            pw.on_island_event(print, calback=print)  # type: ignore[call-arg]


FOLLOWS = """
import asyncio, atexit, threading, time
import pw
from pw.client.connection import current  # it closes the session when the script ends

begun, callers = [threading.Event(), threading.Event()], []

def write(reader, event):
    with open("heard", "a") as file:
        file.write(f"{reader} {event.what}\\n")
    begun[reader].set()

async def read():
    async for event in pw.island_events():
        write(1, event)

def wait():
    while callers[0].is_alive() and "left" not in open("heard").read():
        time.sleep(0.01)

def call(event):
    callers.append(threading.current_thread())
    write(0, event)

CLUSTER
registration = pw.on_island_event(call)
threading.Thread(target=lambda: asyncio.run(read()), daemon=True).start()
for one in begun:
    assert one.wait(60)
"""
"""Writes the events that callbacks and loops of a script hear to a file."""
STARTS = {
    "plain JAX": "atexit.register(wait)",  # called when the cluster has ended, and then the session is closed
    "beside a script": "",
    "LocalCluster": "atexit.register(wait); cluster = pw.LocalCluster(log_level='error')",
    "a LocalCluster to connect to": "atexit.register(wait)\n"
    "pw.connect(pw.LocalCluster(connect=False, log_level='error').address)",
}


@pytest.mark.processes
@pytest.mark.parametrize("how", STARTS)
def test_the_end_of_a_script_is_no_event_for_it(how: str, tmp_path: Path) -> None:
    variables = {"JAX_PLATFORMS": "pw", "PW_DEVICES": "2"} if how == "plain JAX" else {}
    program = Program(tmp_path, ["-c", FOLLOWS.replace("CLUSTER", STARTS[how])], **variables)
    try:
        assert program.end() == 0, program.err
        assert program.err == ""
        heard = (program.folder / "heard").read_text().splitlines()
        assert sorted(heard) == ["0 joined", "1 joined"]
    finally:
        program.kill()


@pytest.mark.processes
def test_a_host_that_is_killed_and_started_again() -> None:
    with pw.LocalCluster(islands=2, log_level="error") as cluster:
        heard: list[pw.IslandEvent] = []
        with pw.on_island_event(heard.append):
            until(lambda: len(heard) == 2, "the present state")
            (host,) = [one for one in pw.status().hosts if one.island == "island-1"]
            os.kill(host.pid, signal.SIGKILL)
            until(lambda: len(heard) == 4, "the return of the island")
        assert cluster.address
        left, returned = heard[2:]
        assert (left.island, left.what, left.epoch) == ("island-1", "left", 1)
        assert "was lost" in left.reason
        assert (returned.island, returned.what, returned.epoch) == ("island-1", "returned", 2)
