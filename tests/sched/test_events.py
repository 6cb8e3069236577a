"""What the controller publishes: the events, the messages that carry them, and readers that are slow."""

from __future__ import annotations

import asyncio
import json
import pathlib
import re
import threading
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import typer
import uvloop
import zmq
from typer.testing import CliRunner

import pw
from pw.cli import events as reader
from pw.cli.main import app
from pw.cli.publisher import EVENTS_AT_ONCE, Publisher, check_events
from pw.client.connection import current
from pw.core.errors import ConnectionFailed, Error
from pw.core.events import (
    KINDS,
    TOPICS,
    ClientEvent,
    CountersEvent,
    EpochEvent,
    Event,
    HostEvent,
    RunEvent,
    TransferEvent,
)
from pw.core.ids import CONTROLLER, Address
from pw.core.messages import Observe, Observed
from pw.devices.host.edges_in import EdgesIn
from pw.testing import InProcessCluster
from pw.transport.access.security import CLOSED, Security
from tests.stages.daemons import Program, until, until_true
from tests.stages.programs import ROOT
from tests.stages.stage import BOUND_S, held, mesh_on, numbers, split

PAGE = (ROOT / "docs" / "monitoring.md").read_text()
(READER,) = re.findall(r"runs in tests/sched/test_events.py -->\n```python\n(.*?)```", PAGE, re.S)


# --- in one process ----------------------------------------------------------------------------------


class Kept:
    """Keeps all events."""

    endpoint = "ipc:///nowhere"

    def __init__(self) -> None:
        self.events: list[Event] = []

    def publish(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[Any], **fields: Any) -> list[Any]:
        return [
            event
            for event in self.events
            if type(event) is kind
            and all(getattr(event, name) == value for name, value in fields.items())
        ]


@pytest.fixture(scope="module")
def kept() -> Kept:
    return Kept()


@pytest.fixture(scope="module")
def cluster(kept: Kept) -> Iterator[InProcessCluster]:
    with InProcessCluster(islands=2, devices_per_island=2, events=kept) as cluster:
        yield cluster


def test_islands_and_hosts_are_published_when_they_come(
    cluster: InProcessCluster, kept: Kept
) -> None:
    islands = kept.of(EpochEvent)
    assert sorted((e.what, e.island, e.epoch, e.hosts) for e in islands) == [
        ("ready", "island-0", 1, ("host-0",)),
        ("ready", "island-1", 1, ("host-1",)),
    ]
    for host in ("host-0", "host-1"):
        assert [event.what for event in kept.of(HostEvent, host=host)] == ["registered", "ready"]


def test_a_run_begins_and_ends_under_its_name(cluster: InProcessCluster, kept: Kept) -> None:
    me = pw.status().clients[0].number
    assert kept.of(ClientEvent, client=me, what="attached")

    def doubled(x: Any) -> Any:
        return x * 2

    y = pw.jit(doubled, mesh=mesh_on(0))(np.float32(3)).block_until_ready()
    until(lambda: kept.of(RunEvent, program="doubled", what="ended"), "the end of the run")
    began, ended = kept.of(RunEvent, program="doubled")
    assert (began.what, ended.what) == ("began", "ended")
    assert began.run == began.attempt == ended.run == ended.attempt
    assert began.run.startswith(f"{me}.")
    assert (began.islands, began.seconds, ended.error) == (("island-0",), 0.0, "")
    assert ended.seconds > 0
    assert float(y) == 6


def test_a_cancelled_run_fails_with_words(cluster: InProcessCluster, kept: Kept) -> None:
    x = pw.put(numbers(8), sharding=split(mesh_on(1)))

    def endless(x: Any) -> Any:
        return x.sum()

    with held(cluster, 1):
        y = pw.jit(endless, mesh=mesh_on(1))(x)
        until(lambda: kept.of(RunEvent, program="endless", what="began"), "the run to begin")
        pw.cancel(y)
        until(lambda: kept.of(RunEvent, program="endless", what="failed"), "the run to fail")
    (failed,) = kept.of(RunEvent, program="endless", what="failed")
    assert "was cancelled with pw.cancel" in failed.error
    with pytest.raises(pw.Cancelled):
        y.block_until_ready()
    refused = pw.jit(endless, mesh=mesh_on(1))(y)
    with pytest.raises(pw.Cancelled):
        refused.block_until_ready()
    (event,) = kept.of(RunEvent, what="refused")
    assert (event.program, event.seconds) == ("endless", 0.0)
    assert "cancelled" in event.error


def test_uploads_and_edges_are_transfers(cluster: InProcessCluster, kept: Kept) -> None:
    east, west = mesh_on(0), mesh_on(1)
    x = pw.put(numbers(40_000), sharding=split(east))
    double = pw.jit(lambda v: v * 2, mesh=east)
    add = pw.jit(lambda v: v + 1, mesh=west)

    @pw.program
    def there(v: Any) -> Any:
        return add(double(v))

    y = there(x).block_until_ready()
    (upload,) = [e for e in kept.of(TransferEvent, what="upload") if e.bytes == 160_000]
    assert (upload.edge, upload.destinations, upload.seconds) == (-1, ("host-0",), None)
    until(lambda: kept.of(TransferEvent, what="edge"), "the report of host-1", 10.0)
    (edge,) = kept.of(TransferEvent, what="edge")
    (began,) = kept.of(RunEvent, program="there", what="began")
    assert (edge.name, edge.sources, edge.destinations) == (began.run, ("host-0",), ("host-1",))
    assert edge.bytes >= 160_000
    assert 0 < edge.seconds < BOUND_S
    assert float(y[1]) == 3


def test_every_process_reports_its_counters(cluster: InProcessCluster, kept: Kept) -> None:
    for process in (CONTROLLER, "host-0", "host-1"):
        until(lambda p=process: kept.of(CountersEvent, process=p), f"counters of {process}", 10.0)
    counters = kept.of(CountersEvent, process="host-0")[-1].counters
    assert counters["launches"] > 0
    assert "bulk_received_bytes" in counters


def test_a_client_that_leaves_says_why(cluster: InProcessCluster, kept: Kept) -> None:
    other, mine = cluster.client(), current.runtime()
    current.use(other)
    number = next(client.number for client in pw.status().clients if client.is_me)
    current.use(mine)
    other.close()
    until(lambda: kept.of(ClientEvent, client=number, what="left"), "the client to leave")
    assert kept.of(ClientEvent, client=number)[-1].reason


def test_the_status_says_where_events_are(cluster: InProcessCluster) -> None:
    assert current.runtime().ask.status().events == Kept.endpoint


def test_a_host_reports_to_its_controller_only(cluster: InProcessCluster, kept: Kept) -> None:
    host = cluster.hosts[0]
    before = host.node.counters["messages_refused"]
    host.node.actors["coordinator"].receive(Address("client-0", "session"), Observe(0.01))
    assert host.node.counters["messages_refused"] == before + 1
    forged = Observed((), 0, {"launches": 10**6})
    refused = cluster.controller.counters["messages_refused"]
    cluster.controller.actors["controller"].receive(Address("client-0", "session"), forged)
    assert cluster.controller.counters["messages_refused"] == refused + 1
    assert not [e for e in kept.of(CountersEvent) if e.counters.get("launches") == 10**6]


def test_without_a_sink_hosts_report_nothing() -> None:
    with InProcessCluster(islands=1, devices_per_island=1) as quiet:
        pw.jit(lambda v: v + 1, mesh=mesh_on(0, 1))(np.float32(1)).block_until_ready()
        receiving = quiet.hosts[0].node.actors["coordinator"].receiving
        assert isinstance(receiving, EdgesIn)
        assert not receiving.observing.is_on
        assert current.runtime().ask.status().events == ""
        controller = quiet.controller.actors["controller"]
        controller.receive(Address(quiet.hosts[0].node.name, "coordinator"), Observed((), 0, {}))
        assert quiet.controller.counters["messages_unexpected"] == 1


# --- the socket --------------------------------------------------------------------------------------


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = uvloop.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def publisher(
    loop: asyncio.AbstractEventLoop, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Publisher]:
    publisher = Publisher(loop, "tcp://127.0.0.1:0")
    yield publisher
    publisher.close()


def subscribe(
    loop: asyncio.AbstractEventLoop,
    publisher: Publisher,
    prefix: str = "pw.1.",
    messages: int = 1000,
) -> zmq.Socket:
    """A reader that is surely connected: it has got the first event."""
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, messages)
    socket.connect(publisher.endpoint)
    socket.subscribe(prefix)

    def is_greeted() -> bool:
        publisher.publish(HostEvent("registered", "greeting"))
        return bool(socket.poll(0))

    loop.run_until_complete(until_true(is_greeted))
    publisher.send()
    numbers = range(0)
    while publisher.numbers["host"] - 1 not in numbers:
        numbers = numbers_of(next_of(loop, socket)[1])
    return socket


def numbers_of(batch: dict[str, Any]) -> range:
    return range(batch["first"], batch["first"] + len(batch["events"]))


def next_of(loop: asyncio.AbstractEventLoop, socket: zmq.Socket) -> tuple[str, dict[str, Any]]:
    loop.run_until_complete(until_true(lambda: socket.poll(0), "a message"))
    name, payload = socket.recv_multipart()
    return name.decode(), json.loads(payload)


def test_events_of_one_turn_leave_together_for_each_topic(
    loop: asyncio.AbstractEventLoop, publisher: Publisher
) -> None:
    socket = subscribe(loop, publisher)
    first = publisher.numbers["host"]
    for number in range(3):
        publisher.publish(HostEvent("ready", f"h{number}"))
        publisher.publish(ClientEvent("attached", number, "me"))
    by_subject = dict(next_of(loop, socket) for _ in range(2))
    hosts, clients = by_subject["pw.1.host"], by_subject["pw.1.client"]
    assert (hosts["first"], clients["first"]) == (first, 0)
    assert hosts["events"] == [{"what": "ready", "host": f"h{n}"} for n in range(3)]
    assert [event["client"] for event in clients["events"]] == [0, 1, 2]
    assert hosts["publisher"] == clients["publisher"]
    socket.close()


def test_a_reader_gets_the_topics_that_it_asked_for(
    loop: asyncio.AbstractEventLoop, publisher: Publisher
) -> None:
    socket = subscribe(loop, publisher, "pw.1.host")
    publisher.publish(ClientEvent("attached", 1, "me"))
    publisher.publish(HostEvent("ready", "h"))
    assert next_of(loop, socket)[0] == "pw.1.host"
    assert not socket.poll(20)
    socket.close()


def test_many_events_are_several_messages_in_order(
    loop: asyncio.AbstractEventLoop, publisher: Publisher
) -> None:
    socket = subscribe(loop, publisher)
    first = publisher.numbers["host"]
    for number in range(2 * EVENTS_AT_ONCE + 1):
        publisher.publish(HostEvent("ready", str(number)))
    batches = [next_of(loop, socket)[1] for _ in range(3)]
    assert [len(batch["events"]) for batch in batches] == [EVENTS_AT_ONCE, EVENTS_AT_ONCE, 1]
    assert [batch["first"] - first for batch in batches] == [0, EVENTS_AT_ONCE, 2 * EVENTS_AT_ONCE]
    socket.close()


def test_a_slow_reader_loses_events_and_sees_how_many(
    loop: asyncio.AbstractEventLoop, publisher: Publisher
) -> None:
    """It reads nothing while 60 MB are published: the publisher goes on, and the numbers have a gap."""
    socket = subscribe(loop, publisher, messages=1)
    first, sent = publisher.numbers["host"], 1500
    large = "h" * 40_000
    for number in range(sent):
        publisher.publish(HostEvent(str(number), large))
        publisher.send()
    publisher.publish(HostEvent("last", ""))
    publisher.send()
    got: list[int] = []
    event = {"what": ""}
    while event["what"] != "after":
        if not socket.poll(20):  # there is room again
            publisher.publish(HostEvent("after", str(publisher.numbers["host"])))
            publisher.send()
        batch = next_of(loop, socket)[1]
        got += numbers_of(batch)
        event = batch["events"][0]
    assert got == sorted(set(got))
    assert got[0] == first
    assert 1 < len(got) < sent, "some came, and some were lost"
    assert got[-1] == int(event["host"]) > first + sent, "the number says how many there were"
    socket.close()


def test_the_end_publishes_what_waits(loop: asyncio.AbstractEventLoop) -> None:
    publisher = Publisher(loop, "tcp://127.0.0.1:0")
    publisher.publish(HostEvent("gone", "h"))
    publisher.close()
    publisher.close()
    with pytest.raises(ConnectionFailed, match="cannot publish events at ipc:///no/such/folder"):
        Publisher(loop, "ipc:///no/such/folder/events")


def test_what_others_could_read_needs_a_word(tmp_path: pathlib.Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(typer.BadParameter, match="could be read by other users"):
        check_events(f"ipc://{tmp_path}/events", CLOSED)
    tmp_path.chmod(0o700)
    check_events(f"ipc://{tmp_path}/events", CLOSED)
    for endpoint in ("tcp://127.0.0.1:0", "tcp://0.0.0.0:7778"):
        with pytest.raises(Error, match=r"not encrypted; use ipc:.* or add --insecure"):
            check_events(endpoint, CLOSED)
        check_events(endpoint, Security(insecure=True))
    with pytest.raises(typer.BadParameter, match="looks like"):
        check_events("somewhere", CLOSED)


# --- what the documents and the command say ----------------------------------------------------------


def test_the_document_has_every_topic_and_every_field() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", PAGE, re.M)
    told = {topic: set(re.findall(r"`(\w+)`", fields)) for topic, _, fields in rows}
    assert set(told) == set(TOPICS)
    for kind in KINDS:
        assert told[kind.topic] == set(kind.__struct_fields__) - {"what"}, kind.topic


def test_lines_name_the_event_and_its_fields() -> None:
    event = {"topic": "run", "number": 3, "time_s": 0.25, "what": "ended", "run": "1.2"}
    event |= {"islands": ["a", "b"], "seconds": 0.5, "error": ""}
    assert reader.line(event).endswith(
        ".250 run      ended      run=1.2 islands=a,b seconds=0.500000"
    )


def test_lines_of_all_topics_have_the_same_columns() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| .*? \|$", PAGE, re.M)
    events = [(topic, what) for topic, words in rows for what in re.findall(r"`(\w+)`", words)]
    assert {"transfer", "counters"} < {topic for topic, _ in events}
    lines = [
        reader.line({"topic": topic, "what": what, "time_s": 0.5, "name": "x"})
        for topic, what in events
    ]
    assert {
        (line.index(what), line.index("name=x"))
        for line, (_, what) in zip(lines, events, strict=True)
    } == {(len("00:00:00.500 transfer "), len("00:00:00.500 transfer registered "))}


def test_the_command_knows_the_topics() -> None:
    with pytest.raises(Error, match="no topic 'runs'; there are island, host"):
        reader.check_topics(["runs"])
    reader.check_topics(TOPICS)


def test_a_gap_is_told_once() -> None:
    """The reader of `pw events` on a publisher that skips numbers."""
    context = zmq.Context.instance()
    socket = context.socket(zmq.XPUB)
    socket.setsockopt(zmq.LINGER, 0)
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    def send(publisher: str, first: int, *hosts: str) -> None:
        events = [{"what": "ready", "host": host} for host in hosts]
        batch = {"publisher": publisher, "first": first, "time_s": 1.0, "events": events}
        socket.send_multipart([b"pw.1.host", json.dumps(batch).encode()])

    events = reader.read(f"tcp://127.0.0.1:{port}", ["host"])

    def publish() -> None:
        assert socket.recv() == b"\x01pw.1.host"
        send("a", 5, "x", "y")
        send("a", 9, "z")
        send("b", 0, "w")

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    got = [next(events) for _ in range(5)]
    thread.join(BOUND_S)
    events.close()
    socket.close()
    assert [event.get("host", event["what"]) for event in got] == ["x", "y", "lost", "z", "w"]
    assert got[2] == {"topic": "host", "what": "lost", "events": 2, "time_s": 1.0}
    assert [event.get("number") for event in got] == [5, 6, None, 9, 0]


# --- real processes ----------------------------------------------------------------------------------


@pytest.mark.processes
def test_the_readers_in_the_document_and_on_the_command_line(tmp_path: pathlib.Path) -> None:
    """Ten lines of plain pyzmq read everything; `pw events` reads runs."""
    with pw.LocalCluster(islands=2, events=True) as local:
        plain = Program(tmp_path / "plain", ["-c", READER, local.events])
        command = Program(
            tmp_path / "command",
            ["-m", "pw.cli.main", "events", "--json", "run", "--address", local.address],
        )
        try:
            f = pw.jit(lambda v: v + 1, mesh=mesh_on(0, 1))
            far = pw.jit(lambda v: v * 2, mesh=mesh_on(1, 1))
            x = pw.put(
                jnp.ones(20_000), sharding=pw.NamedSharding(mesh_on(0, 1), pw.PartitionSpec())
            )

            there = pw.program(lambda v: far(f(v)))

            def called() -> bool:
                there(x).block_until_ready()
                return "pw.1.run" in plain.out and '"topic": "run"' in command.out

            until(called, "both readers to see runs")

            def seen() -> set[tuple[str, str]]:
                whole = [line for line in plain.out.splitlines(True) if line.endswith("\n")]
                lines = [line.split(" ", 2) for line in whole]
                return {(subject, json.loads(event)["what"]) for subject, _, event in lines}

            wanted = {
                ("pw.1.run", "began"),
                ("pw.1.run", "ended"),
                ("pw.1.transfer", "edge"),
                ("pw.1.counters", "totals"),
            }
            until(lambda: wanted <= seen(), "all events")
            for text in command.out.splitlines():
                assert json.loads(text)["topic"] == "run"
            shown = CliRunner().invoke(
                app, ["events", "--limit", "2", "counters", "--address", local.address]
            )
            assert shown.exit_code == 0, shown.output
            assert len(shown.stdout.splitlines()) == 2
            assert "totals" in shown.stdout
            assert plain.err == command.err == ""
        finally:
            plain.kill()
            command.kill()
