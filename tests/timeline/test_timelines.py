"""Timelines: what processes record, how a client reads it, and the file that Perfetto opens."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.client.connection.script import process_name
from pw.client.session.timelines import RecordedProcess
from pw.core import recorder as kinds
from pw.core.ids import CONTROLLER, Address, client_id, client_of, store_of
from pw.core.messages import PeerLost, ReadRecords, Records
from pw.core.recorder import LIMIT, WIDTH, Recorder
from pw.core.timeline import AT_ONCE, PART, READER_TIMEOUT_S, Recordings
from pw.operating.timeline import chrome
from pw.operating.timeline.resolve import records_in, resolved
from pw.operating.timeline.timeline import Call, Launch, Timeline, letters
from pw.testing import InProcessCluster
from tests.stages.actors import FakeEnv, World
from tests.stages.daemons import start_module, until

# --- the records of one process ----------------------------------------------------------------------

CLIENTS = (Address("client-1", "session"), Address("client-2", "session"))


class Host:
    """A process that records, and its clients."""

    def __init__(self) -> None:
        self.world = World()
        self.env: Any = FakeEnv(self.world, store_of("h0"))
        self.recorder: Recorder = self.env.recorder
        self.recordings = Recordings(self.env, lambda sender: sender in CLIENTS)
        self.asked = 0

    def read(
        self, client: Address = CLIENTS[0], *, stop: bool = False, timeline: int = 1
    ) -> Records:
        self.asked += 1
        question = ReadRecords(timeline, self.asked, stop)
        self.recordings.handlers()[ReadRecords](client, question)
        answer = self.world.to(client, Records)[-1]
        assert (answer.timeline, answer.question) == (timeline, self.asked)
        return answer  # type: ignore[no-any-return]

    def record(self, *values: int) -> None:
        for value in values:
            if self.recorder.on:
                self.recorder.add(kinds.CALLED, 1.0, 0.0, value)


def values(answer: Records) -> list[int]:
    found = [record[3] for record in records_in(answer.data)]
    assert len(found) == answer.count
    return found


def test_nothing_is_recorded_before_a_client_asks_nor_after_it_stops() -> None:
    host = Host()
    host.record(1)
    assert values(host.read()) == []
    host.record(2, 3)
    assert values(host.read()) == [2, 3]
    host.record(4)
    last = host.read(stop=True)
    assert (values(last), last.left) == ([4], 0)
    assert not host.recorder.on
    assert host.recorder.values == []


def test_two_clients_read_at_their_own_pace() -> None:
    host = Host()
    host.read()
    host.record(1)
    host.read(CLIENTS[1])
    host.record(2)
    assert values(host.read(CLIENTS[1], stop=True)) == [2]
    host.record(3)
    assert values(host.read(stop=True)) == [1, 2, 3]
    assert host.recorder.values == []


def test_one_client_may_record_several_timelines() -> None:
    host = Host()
    host.read(timeline=1)
    host.record(1)
    host.read(timeline=2)
    host.record(2)
    assert values(host.read(timeline=1, stop=True)) == [1, 2]
    assert host.recorder.on
    assert values(host.read(timeline=2, stop=True)) == [2]


def test_a_message_has_a_bounded_part_and_says_how_much_is_left() -> None:
    host = Host()
    host.read()
    host.record(*range(2 * PART + 5))
    found: list[int] = []
    answers = []
    while not answers or answers[-1].left:
        answers.append(host.read(stop=True))
        assert answers[-1].first == len(found)
        found += values(answers[-1])
        host.record(-1)  # the client has stopped: this is not its
    assert [answer.count for answer in answers] == [PART, PART, 5]
    assert found == list(range(2 * PART + 5))


def test_a_name_is_sent_once() -> None:
    host = Host()
    host.read()
    first, second = host.recorder.name("f"), host.recorder.name("g")
    assert dict(host.read().names) == {first: "f", second: "g"}
    assert host.recorder.name("f") == first
    assert host.read().names == ()
    assert dict(host.read(CLIENTS[1]).names) == {first: "f", second: "g"}


def test_what_has_not_ended_is_recorded_when_a_client_stops() -> None:
    host = Host()
    host.recorder.unfinished["a"] = lambda: host.recorder.add(kinds.CALLED, 1.0, 0.0, 7)
    assert values(host.read(stop=True)) == []  # nothing was recorded
    host.read()
    host.record(1)
    assert values(host.read()) == [1]
    assert values(host.read(stop=True)) == [7]


def test_records_without_room_are_dropped_and_counted() -> None:
    host = Host()
    host.read()
    for _ in range(LIMIT + 7):
        host.recorder.add(kinds.CALLED, 1.0, 2.0, 1)
    assert len(host.recorder.values) == LIMIT * WIDTH
    assert host.read().dropped == 7
    assert host.read().dropped == 0


def test_a_client_records_so_many_timelines_at_once() -> None:
    host = Host()
    for timeline in range(AT_ONCE):
        host.read(timeline=timeline)
    error = host.read(timeline=AT_ONCE).error
    assert error is not None
    assert f"{AT_ONCE} timelines at once; end one" in error.message
    assert host.read(CLIENTS[1]).error is None
    host.read(timeline=0, stop=True)
    assert host.read(timeline=AT_ONCE).error is None


def test_a_process_that_is_no_client_gets_nothing() -> None:
    host = Host()
    stranger = Address("stranger", "session")
    assert host.read(stranger).refused
    assert not host.recorder.on


@pytest.mark.parametrize("how", ["lost", "silent"])
def test_a_client_that_is_gone_is_recorded_for_no_longer(how: str) -> None:
    host = Host()
    host.read()
    host.read(CLIENTS[1])
    host.record(1)
    if how == "lost":
        lost = PeerLost(CLIENTS[0].node, "closed")
        host.recordings.handlers()[PeerLost](host.env.address, lost)
    else:
        for _ in range(8):
            host.world.now_s += READER_TIMEOUT_S / 6
            host.read(CLIENTS[1])
            for alarm in list(host.world.alarms):
                if alarm.due_s <= host.world.now_s:
                    host.world.alarms.remove(alarm)
                    alarm.note()  # type: ignore[operator]
        assert host.world.counters["timelines_ended"] == 1
    assert host.recorder.on
    host.record(2)
    host.read(CLIENTS[1], stop=True)
    assert not host.recorder.on
    assert host.recorder.values == []
    again = host.read()
    assert (again.first, again.since_s) == (0, host.world.now_s)  # another recording


# --- clocks ------------------------------------------------------------------------------------------


def test_the_shortest_round_tells_the_difference_of_the_clocks() -> None:
    source = RecordedProcess("h0")
    source.ping(10.0, 1011.0, 12.0)
    assert (source.offset_s, source.error_s) == (1000.0, 1.0)
    source.ping(20.0, 1020.3, 20.2)
    assert source.offset_s == pytest.approx(1000.2)
    assert source.error_s == pytest.approx(0.1)
    source.ping(30.0, 9999.0, 33.0)
    assert source.offset_s == pytest.approx(1000.2)


@pytest.mark.parametrize(("offset_s", "start_s"), [(500.0, 1.0), (1e-5, 501.0)])
def test_times_are_those_of_this_process(offset_s: float, start_s: float) -> None:
    """An offset within its error is none: both processes have the clock of one machine."""
    source = made_of((kinds.UPLOADED, 501.0, 501.5, client_id(3, 7), 64))
    source.offset_s, source.error_s = offset_s, 1e-4
    timeline = resolved([source], {}, 0.0, 600.0)
    (upload,) = timeline.transfers
    assert upload.start_s == pytest.approx(start_s)
    assert (upload.client, upload.kind, upload.is_incoming) == (3, "upload", True)


# --- from records to computations --------------------------------------------------------------------

NAMES = {1: "0 f", 2: "0,1 f", 3: "h1", 4: "h0", 5: "island-0", 6: "program", 7: "1 f"}
RUN = client_id(2, 9)


def made_of(*records: tuple[Any, ...], node: str = "h0") -> RecordedProcess:
    recorder = Recorder()
    for record in records:
        recorder.add(*record)
    data = msgspec.msgpack.encode(recorder.between(0, recorder.end))
    return RecordedProcess(node, 0.0, 0.0, [data], NAMES, 0.0, len(records))


def computed(
    called_s: float, ended_s: float, serial: int, devices: int = 1, after: tuple[int, ...] = ()
) -> tuple[Any, ...]:
    return (kinds.COMPUTED, called_s, ended_s, RUN, 0, serial, devices, 0, after)


def ended(when_s: float, serial: int) -> tuple[Any, ...]:
    return (kinds.ENDED, when_s, 0.0, serial)


CASES: dict[str, tuple[list[tuple[Any, ...]], list[tuple[str, float, float, int, bool]]]] = {
    "it ends before its call returns": ([computed(1, 2, 1)], [("0", 1, 2, 1, False)]),
    "it waits for the one before": (
        [computed(1, 0, 1), computed(1.5, 0, 2), ended(3, 1), ended(5, 2)],
        [("0", 1, 3, 1, False), ("0", 3, 5, 1, False)],
    ),
    "it waits for its argument from another device": (
        [computed(1, 0, 1), computed(1.5, 0, 2, devices=7, after=(1,)), ended(3, 1), ended(5, 2)],
        [("0", 1, 3, 1, False), ("1", 3, 5, 1, False)],
    ),
    "on two devices": (
        [computed(1, 0, 1, devices=2), computed(1.5, 0, 2, devices=7), ended(3, 1), ended(4, 2)],
        [("0", 1, 3, 1, False), ("1", 1, 3, 1, False), ("1", 3, 4, 1, False)],
    ),
    "a donated result hides an end": (
        [computed(1, 0, 1), computed(1.5, 0, 2), ended(5, 2)],
        [("0", 1, 3, 2, False), ("0", 3, 5, 2, False)],
    ),
    "an end is seen after the next one": (
        [computed(1, 0, 1), computed(1.5, 5, 2), ended(5.5, 1)],
        [("0", 1, 3, 2, False), ("0", 3, 5, 2, False)],
    ),
    "an end is not seen": ([computed(1, 0, 1)], [("0", 1, 10, 1, True)]),
    "before and after the timeline": (
        [computed(-3, -2, 1), computed(-1, 1, 2), computed(11, 12, 3)],
        [("0", -1, 1, 1, False)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_when_computations_begin_and_end(case: str) -> None:
    records, wanted = CASES[case]
    timeline = resolved([made_of(*records)], {}, 0.0, 10.0)
    found = [
        (one.device, one.start_s, one.end_s, one.divided, one.is_open)
        for one in timeline.computations
    ]
    assert found == wanted


def test_an_edge_has_two_ends_and_a_wait() -> None:
    sent = made_of((kinds.SENT, 4.0, 5.0, RUN, 1, 3, 100))
    received = made_of((kinds.RECEIVED, 2.0, 5.5, RUN, 1, 4, 100), node="h1")
    timeline = resolved([sent, received], {}, 0.0, 10.0)
    assert [(t.host, t.is_incoming, t.start_s, t.end_s) for t in timeline.transfers] == [
        ("h0", False, 4.0, 5.0),
        ("h1", True, 4.0, 5.5),  # the bytes are on their way from when they are sent
    ]
    (wait,) = timeline.waits
    assert (wait.host, wait.peer, wait.start_s, wait.end_s) == ("h1", "h0", 2.0, 5.5)


def test_the_last_record_of_a_launch_or_a_call_is_right() -> None:
    def launched(ended_s: float, segment: int = 0) -> tuple[Any, ...]:
        return (kinds.LAUNCHED, 2.0, ended_s, RUN, segment, 5, 3.0, 500_000 if ended_s else 0)

    source = made_of(
        *(launched(0.0), launched(4.0)),
        *((kinds.CALLED, 1.0, 0.0, RUN, 6), (kinds.CALLED, 1.0, 4.5, RUN, 6)),
        *((kinds.CALLED, -2.0, -1.0, RUN + 1, 6), (kinds.CALLED, 11.0, 0.0, RUN + 2, 6)),
        (kinds.CALLED, -2.0, 0.0, RUN + 3, 6),
        launched(12.0, segment=1),
    )
    timeline = resolved([source], {}, 0.0, 10.0)
    assert timeline.launches == [
        Launch("island-0", RUN, 0, 2.0, 3.0, 4.0, 0.5),
        Launch("island-0", RUN, 1, 2.0, 3.0, None, 0.5),
    ]
    assert timeline.calls == [Call(RUN + 3, "program", None, None), Call(RUN, "program", 1.0, 4.5)]


def test_what_is_missing_is_told() -> None:
    whole, lost = made_of(computed(1, 2, 1)), made_of(computed(1, 0, 1), ended(4, 0), node="h1")
    lost.lost, whole.dropped = "host h1 was lost", 12
    timeline = resolved([whole, lost], {}, 0.0, 10.0)
    assert [one.end_s for one in timeline.computations if one.host == "h1"] == [4.0]
    assert timeline.notes == [
        "h0: 12 records found no room and are missing",
        "h1: what it had not sent is missing, because host h1 was lost",
    ]


def test_clients_have_letters() -> None:
    found = letters(range(1, 29))
    assert [found[n] for n in (1, 2, 26, 27, 28)] == ["A", "B", "Z", "AA", "AB"]


# --- a whole cluster -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(islands=2, devices_per_island=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pipeline(cluster: InProcessCluster) -> Any:
    """A program over both islands, with an edge of 256 KiB, which has run."""
    device_set = pw.make_virtual_device_set()
    meshes = [
        pw.Mesh(device_set.add_slice(devices=2, island=f"island-{i}").devices, ("x",))
        for i in range(2)
    ]

    def double(x: Any) -> Any:
        return x * 2

    def total(x: Any) -> Any:
        return x.sum()

    first = pw.jit(double, mesh=meshes[0], in_shardings=P("x"), out_shardings=P("x"))
    second = pw.jit(total, mesh=meshes[1], in_shardings=P("x"), out_shardings=P())

    @pw.program
    def double_and_add(x: Any) -> Any:
        return second(first(x))

    double_and_add(np.ones(1 << 16, np.float32)).block_until_ready()
    return double_and_add


def recorded(pipeline: Any, path: Path | None, calls: int = 5) -> Timeline:
    with pw.trace(path) as timeline:
        results = [pipeline(np.ones(1 << 16, np.float32)) for _ in range(calls)]
        assert float(np.asarray(results[-1])) == 1 << 17
        for result in results:
            result.block_until_ready()
    return timeline


def opened(path: Path) -> list[dict[str, Any]]:
    """The events of a file, in the form that Chrome's format prescribes."""
    document = json.loads(path.read_text())
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    events: list[dict[str, Any]] = document["traceEvents"]
    for event in events:
        assert {"ph", "pid", "name"} <= set(event), event
        if event["ph"] == "M":
            continue
        assert math.isfinite(event["ts"]), event
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert isinstance(event["tid"], int)
    return events


def rows(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The slices of each row, by the names of the process and of the row."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            where = (event["pid"], event["tid"])
            found[f"{processes[event['pid']]}: {threads[where]}"].append(event)
    return found


def test_a_timeline_has_what_was_done(pipeline: Any, tmp_path: Path) -> None:
    timeline = recorded(pipeline, tmp_path / "trace.json")
    assert timeline.notes == []
    me = next(iter(timeline.clients))
    done = Counter((one.host, one.device, one.name) for one in timeline.computations)
    assert done == {
        ("host-0", "0", "double"): 5,
        ("host-0", "1", "double"): 5,
        ("host-1", "0", "total"): 5,
        ("host-1", "1", "total"): 5,
    }
    for one in timeline.computations:
        assert one.client in timeline.clients
        assert timeline.program(one.run) == "double_and_add"
        assert 0 <= one.called_s <= one.start_s <= one.end_s <= timeline.length_s
    edges = [one for one in timeline.transfers if one.kind == "edge"]
    assert Counter((one.host, one.peer, one.is_incoming) for one in edges) == {
        ("host-0", "host-1", False): 5,
        ("host-1", "host-0", True): 5,
    }
    assert sum(t.kind == "upload" for t in timeline.transfers) == 5
    assert Counter(one.island for one in timeline.launches) == {"island-0": 5, "island-1": 5}
    for launch in timeline.launches:
        assert launch.queued_s is not None
        assert launch.launched_s is not None
        assert launch.queued_s <= launch.launched_s
    assert len(timeline.calls) == 5
    assert {p.node for p in timeline.processes} == {CONTROLLER, "host-0", "host-1"}
    assert 0 < timeline.clock_error_s < 1.0
    assert me in {client_of(call.run) for call in timeline.calls}


def test_the_second_stage_begins_when_the_first_has_ended(pipeline: Any) -> None:
    timeline = recorded(pipeline, None)
    for call in timeline.calls:
        first = [c for c in timeline.computations if (c.run, c.name) == (call.run, "double")]
        second = [c for c in timeline.computations if (c.run, c.name) == (call.run, "total")]
        assert len(first) == len(second) == 2
        # The end of the first is seen by a thread, and the bytes may be sent before that wakes up.
        assert max(c.start_s for c in first) < min(c.start_s for c in second)


def test_the_file_has_a_row_for_each_device_and_arrows(pipeline: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    recorded(pipeline, path)
    events = opened(path)
    found = rows(events)
    for row in ("host host-0: device 0", "host host-0: device 1", "host host-1: device 1"):
        assert len(found[row]) == 5
    assert {"host host-0: transfers out", "host host-1: transfers in", "host host-1: waits"} <= set(
        found
    )
    assert {"controller: calls", "controller: island-1: launches"} <= set(found)
    assert found["host host-0: device 0"][0]["name"] == "double [A]"
    for slices in found.values():  # what is in one row does not overlap
        slices.sort(key=lambda e: e["ts"])
        for one, other in pairwise(slices):
            assert one["ts"] + one["dur"] <= other["ts"] + 0.01
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert set(starts) == set(ends)
    slices_at = {(e["pid"], e["tid"], e["ts"]) for each in found.values() for e in each}
    for number, end in ends.items():
        assert end["bp"] == "e"
        assert end["cat"] == starts[number]["cat"]
        assert (end["pid"], end["tid"], end["ts"]) in slices_at
    arrows = Counter(e["cat"] for e in starts.values())
    assert arrows["launch"] >= 10
    assert arrows["edge"] == 5
    assert arrows["wait"] >= 1


def test_several_timelines_at_a_time(
    pipeline: Any, cluster: InProcessCluster, tmp_path: Path
) -> None:
    other = cluster.client()
    with pw.trace(None) as outer:
        with pw.trace(tmp_path / "other.json", runtime=other) as inner:
            pipeline(np.ones(1 << 16, np.float32)).block_until_ready()
        pipeline(np.ones(1 << 16, np.float32)).block_until_ready()
    assert len(inner.calls) == 1
    assert len(outer.calls) == 2
    assert set(outer.clients) == set(inner.clients)  # of all clients, as `pw status` shows them
    other.close()
    for host in cluster.hosts:
        assert not host.node.recorder.on


def test_a_client_that_leaves_ends_its_timelines(cluster: InProcessCluster) -> None:
    other = cluster.client()
    other.ask.start_timeline()
    nodes = [cluster.controller, *(host.node for host in cluster.hosts)]
    assert all(node.recorder.on for node in nodes)
    other.close()
    until(lambda: not any(node.recorder.on for node in nodes), "the recording has ended")


def test_the_error_of_the_block_is_the_one_that_is_raised(pipeline: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(ZeroDivisionError), pw.trace(path):
        pipeline(np.ones(1 << 16, np.float32)).block_until_ready()
        raise ZeroDivisionError
    assert rows(opened(path))["host host-0: device 0"]


def test_a_folder_that_does_not_exist_is_told_before_anything_is_recorded(
    pipeline: Any, tmp_path: Path
) -> None:
    began = []
    with pytest.raises(pw.ArgumentError, match="no folder"), pw.trace(tmp_path / "no" / "t.json"):
        began.append(True)
    assert not began


def test_a_host_function_has_a_row(cluster: InProcessCluster, tmp_path: Path) -> None:
    device_set = pw.make_virtual_device_set()
    devices = device_set.add_slice(devices=1).devices

    def slow(x: Any) -> Any:
        time.sleep(0.02)
        return x + 1

    shape = jax.ShapeDtypeStruct((4,), np.float32)
    slowly = pw.host_function(slow, devices=devices, result_shape_dtypes=shape)
    slowly(np.zeros(4, np.float32)).block_until_ready()
    with pw.trace(tmp_path / "t.json") as timeline:
        slowly(np.zeros(4, np.float32)).block_until_ready()
    (one,) = timeline.computations
    assert (one.device, one.name) == ("python", "slow")
    assert one.end_s - one.start_s >= 0.02
    assert any("host functions" in row for row in rows(opened(tmp_path / "t.json")))


def test_donated_results_are_timed(cluster: InProcessCluster) -> None:
    device_set = pw.make_virtual_device_set()
    devices = device_set.add_slice(devices=1).devices

    def step(x: Any) -> Any:
        return x @ x / 100

    donating = pw.jit(step, devices=devices, donate_argnums=(0,))
    x = donating(np.ones((300, 300), np.float32))
    x.block_until_ready()
    timeline = Timeline(0.0)

    def has_ends() -> bool:
        """Whether the timeline has all ends; a watcher may hear of one after the timeline has ended."""
        nonlocal timeline, x
        with pw.trace(None) as timeline:
            for _ in range(10):
                x = donating(x)
            x.block_until_ready()
        assert len(timeline.computations) == 10
        return not any(one.is_open for one in timeline.computations[:-1])

    until(has_ends, "a timeline with the ends of its computations")
    assert timeline.busy() <= timeline.length_s
    assert timeline.busy(lambda one: one.name == "another") == 0


def test_an_empty_timeline_is_a_file_too(tmp_path: Path) -> None:
    chrome.write(Timeline(1.0), tmp_path / "t.json")
    assert rows(opened(tmp_path / "t.json")) == {}


# --- processes ---------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.long
def test_a_host_that_is_killed_leaves_what_it_has_not_sent(tmp_path: Path) -> None:
    """And `pw trace` shows the work of another process meanwhile."""
    with pw.LocalCluster(islands=2) as cluster:
        device_set = pw.make_virtual_device_set()
        slices = [device_set.add_slice(devices=1, island=f"island-{i}").devices for i in (0, 1)]

        def add(x: Any) -> Any:
            return x + 1

        calls = [pw.jit(add, devices=devices) for devices in slices]
        zero = np.zeros(4, np.float32)
        for call in calls:
            call(zero).block_until_ready()
        path = tmp_path / "seen.json"
        options = ("--seconds", 1, "-o", path, "--address", cluster.address)
        watching = start_module("pw.cli.main", "trace", *options, folder=tmp_path)
        while watching.process.poll() is None:
            calls[0](zero).block_until_ready()
        assert watching.end() == 0, watching.err
        assert "clocks agree within" in watching.out
        assert rows(opened(path))["host island-0-host-0: device 0"]
        assert process_name() in path.read_text()

        with pw.trace(tmp_path / "t.json") as timeline:
            for call in calls:
                call(zero).block_until_ready()
            victim = next(h for h in pw.status().hosts if h.island == "island-1")
            os.kill(victim.pid, signal.SIGKILL)
            until(lambda: _is_another(victim), "the host is back")
            calls[1](zero).block_until_ready()
        notes = [note for note in timeline.notes if note.startswith(victim.name)]
        assert notes, timeline.notes
        assert "missing" in notes[0]
        assert {one.host for one in timeline.computations} >= {"island-0-host-0"}


def _is_another(victim: Any) -> bool:
    return any(
        host.name == victim.name and host.pid != victim.pid and host.state == "ready"
        for host in pw.status().hosts
    )
