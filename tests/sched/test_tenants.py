"""Tenants: what a client may see and change of what others have, and which number it may claim."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from pw.core import messages as msg
from pw.core.compact import Compact
from pw.core.errors import ArgumentError, ErrorReport
from pw.core.ids import CONTROL, CONTROLLER, Address, client_id, run_name, session_of
from pw.core.messages.owners import OwnerMark, visible
from pw.core.rights import rights_of_options
from pw.core.tenants import NO_SECRET, OPERATOR, Claims, may_touch, shares_of_tenants
from pw.sched.control.explain.memory import OTHERS, with_holders
from tests.stages.actors import Recorder, World
from tests.stages.scripted import SMALL, Client, chain, join, split

RED, BLUE = "red", "blue"


class Stage:
    """One island, and clients `red`, `scarlet` (both of tenant red), `blue` and `op`, with one run each."""

    def __init__(self) -> None:
        self.world = World(1)
        self.islands: list[msg.IslandInfo] = []
        self.world.controller(island_status=lambda: tuple(self.islands))
        self.host = self.world.host("h0", "i", 1)
        self.world.tenants = {"red": RED, "scarlet": RED, "blue": BLUE}
        self.world.settle()
        self.red, self.scarlet, self.blue, self.op = (
            self.join(name) for name in ("red", "scarlet", "blue", "op")
        )
        self.numbers = {name: getattr(self, name).number for name in ("red", "scarlet", "blue")}

    def join(self, name: str) -> Client:
        client = join(self.world, name)
        self.world.settle()
        return client

    def ask(self, client: Client, message: Any, kind: type) -> Any:
        before = len(client.of(kind))
        client.tell(message)
        self.world.settle()
        self.world.wait(1.0)
        answers = client.of(kind)[before:]
        assert len(answers) == 1, answers
        return answers[0]

    def work(self, client: Client) -> tuple[int, int]:
        """A run that waits for the upload of its argument, and its result."""
        slice_ = client.slice(1)
        self.world.settle()
        spec = split(slice_, 1)
        program = client.program(chain([spec]))
        argument, run, result = client.id(), client.id(), client.id()
        client.sent_runs += 1
        client.tell(msg.CreateArray(argument, spec))
        client.tell(msg.Run(run, program, (argument,), (result,)))
        self.world.settle()
        assert run in self.world.control.runs.in_flight
        return run, result


@pytest.mark.parametrize(
    ("tenant", "other", "may"),
    [(OPERATOR, RED, True), (RED, RED, True), (RED, BLUE, False), (RED, OPERATOR, False)],
)
def test_only_its_tenant_and_operators_may_touch_what_a_client_has(
    tenant: str, other: str, may: bool
) -> None:
    assert may_touch(tenant, other) is may


# --- shares and priorities ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "priority", "words"),
    [
        (4.5, 0, "share=4 or less (pw-controller --max-share,"),
        (1.0, 3, "priority=2 or less (pw-controller --max-priority,"),
        (4.0, 2, ""),
    ],
)
def test_shares_and_priorities_have_bounds(share: float, priority: int, words: str) -> None:
    """A client that comes back to a controller with lower bounds goes on, within them."""
    world = World(1)
    world.controller(rights=rights_of_options(4.0, 2, {RED: 3.0}))
    world.host("h0", "i", 1)
    world.tenants = {"new": RED, "back": RED}
    world.settle()
    new, back = (world.add(session_of(name), Recorder) for name in ("new", "back"))
    new.env.send(CONTROL, msg.Attach("new", share, priority))
    back.env.send(CONTROL, msg.Attach("back", share, priority, 900, NO_SECRET.claim(900, RED)))
    world.settle()
    assert [
        error.error.message for error in new.of(msg.Evicted) if words in error.error.message
    ] == [error.reason for error in new.of(msg.Evicted)]
    assert {error.error.kind for error in new.of(msg.Evicted)} == (
        {"QuotaExceeded"} if words else set()
    )
    asked = {} if words else {"new": (share, priority)}
    sessions = world.control.sessions
    shown = {one.name: sessions.weight_of(one) for one in sessions.clients}
    assert shown == {"back": (min(share, 4.0), min(priority, 2))} | asked
    assert world.schedulers["i"].queues.clients[900].stake == (900, min(share, 4.0), RED, 3.0)


@pytest.mark.parametrize("text", ["red", "red=", "red=0", "red=-1", "red=inf", "=1", "red=1,red=2"])
def test_shares_of_tenants_are_positive_numbers(text: str) -> None:
    assert shares_of_tenants("red=2, blue=0.5,") == {"red": 2.0, "blue": 0.5}
    with pytest.raises(ArgumentError, match="no share of a tenant; write each tenant once"):
        shares_of_tenants(text)


# --- cancelling and draining ----------------------------------------------------------------------


@pytest.mark.parametrize(("asker", "may"), [("scarlet", True), ("op", True), ("blue", False)])
def test_runs_are_cancelled_by_the_same_tenant_and_by_operators(asker: str, may: bool) -> None:
    stage = Stage()
    run, result = stage.work(stage.red)
    answer = stage.ask(getattr(stage, asker), msg.CancelRuns(1, stage.red.number), msg.Answered)
    if may:
        assert answer.error is None
        assert stage.red.failed[result].kind == "Cancelled"
        who = {"scarlet": RED, "op": OPERATOR}[asker]
        written = dict(stage.world.audited)["cancel"]
        assert (written["tenant"], written["name"], written["of"]) == (who, asker, RED)
        return
    assert answer.error.kind == "AccessRefused"
    assert answer.error.message == (
        "tenant 'blue' may not cancel runs of client 1, which is of another tenant; clients of that tenant "
        "and the tenant 'operator' may"
    )
    assert run in stage.world.control.runs.in_flight
    assert not stage.red.failed
    written = dict(stage.world.audited)["refused"]
    assert (written["tenant"], written["name"], written["node"]) == (BLUE, "blue", "blue")


def test_only_operators_drain_hosts() -> None:
    stage = Stage()
    answer = stage.ask(stage.red, msg.DrainHost(1, "h0"), msg.Answered)
    assert answer.error.kind == "AccessRefused"
    assert "tenant 'red' may not drain host h0; the tenant 'operator' may" in answer.error.message
    assert not stage.world.resources.inventory.draining
    stage.op.tell(msg.DrainHost(1, "h0"))
    stage.world.settle()
    assert ("drain", {"tenant": OPERATOR, "name": "op", "node": "op", "host": "h0"}) in (
        stage.world.audited
    )


def test_refusals_do_not_fill_the_log() -> None:
    stage = Stage()
    for request in range(100):
        stage.blue.tell(msg.DrainHost(request, "h0"))
    stage.world.settle()
    assert [event for event, _ in stage.world.audited].count("refused") == 1
    assert stage.world.counters["requests_refused"] == 100
    stage.world.wait(1.5)
    stage.blue.tell(msg.DrainHost(100, "h0"))
    stage.world.settle()
    assert [event for event, _ in stage.world.audited].count("refused") == 2


# --- what clients may see -------------------------------------------------------------------------


def test_status_shows_the_clients_and_runs_of_the_tenant_and_counts_the_others() -> None:
    stage = Stage()
    stage.work(stage.red)
    stage.work(stage.blue)
    status = stage.ask(stage.scarlet, msg.GetStatus(1), msg.Status)
    assert {client.name: client.tenant for client in status.clients} == {"red": RED, "scarlet": RED}
    assert {run.client for run in status.runs} == {stage.red.number}
    assert (status.hidden_clients, status.hidden_runs) == (2, 1)
    status = stage.ask(stage.op, msg.GetStatus(2), msg.Status)
    assert len(status.clients) == 4
    assert len(status.runs) == 2
    assert (status.hidden_clients, status.hidden_runs) == (0, 0)


@pytest.mark.parametrize("kind", [msg.GetStatus, msg.GetStats])
def test_a_process_that_is_not_attached_sees_nothing(kind: type) -> None:
    stage = Stage()
    stranger = stage.world.add(session_of("stranger"), Recorder)
    stranger.env.send(CONTROL, kind(1))
    stage.world.settle()
    assert not stranger.of(msg.Status)
    assert not stranger.of(msg.Stats)
    assert stranger.of(msg.Evicted)


def test_plans_are_of_programs_of_the_tenant() -> None:
    stage = Stage()
    run, _ = stage.work(stage.red)
    for name in ("chain", run_name(run)):
        answer = stage.ask(stage.blue, msg.GetPlan(1, name), msg.Answered)
        assert "there is no program" in answer.error.message
        assert "chain" not in answer.error.message.partition("programs:")[2]
        assert stage.ask(stage.scarlet, msg.GetPlan(2, name), msg.ProgramPlan).name == "chain"


def test_an_explanation_names_no_work_of_other_tenants() -> None:
    stage = Stage()
    stage.work(stage.red)
    for asker, sees in ((stage.op, True), (stage.scarlet, True), (stage.blue, False)):
        told = stage.ask(asker, msg.Explain(1), msg.Explanation)
        queued = [work.run for report in told.work for work in (*report.heads, *report.oldest)]
        assert bool(queued) is sees
        assert ("chain" in told.text) is sees
        assert told.text.endswith("\nnot shown: 1 run of other tenants") is not sees
        names = {client.name for client in told.clients}
        assert ("red" in names) is sees
        assert asker.env.address.node in names


def test_reports_of_memory_have_one_sum_for_the_arrays_of_other_tenants() -> None:
    stage = Stage()
    host = msg.HostInfo("h0", "i", "ready", 1, 1, "", False)
    stage.islands.append(msg.IslandInfo("i", "ready", "cpu", "", (host,), 1, (), 1, 0, 0, 0))
    clients = (stage.red, stage.scarlet, stage.blue)
    for client in clients:
        slice_ = client.slice(1)
        stage.world.settle()
        client.upload(np.arange(SMALL), split(slice_, 1))
    stage.world.settle()
    (whole,) = stage.ask(stage.op, msg.GetMemory(1), msg.Memory).devices
    assert [one.name for one in whole.owners] == ["red", "scarlet", "blue"]
    assert len(whole.largest) == 3
    (device,) = stage.ask(stage.blue, msg.GetMemory(1), msg.Memory).devices
    own, others = device.owners
    assert own == whole.owners[2]
    assert others == msg.OwnerMemory(0, OTHERS, 2, 2 * own.arrays_bytes, 0)
    assert [one.client for one in device.largest] == [own.client]
    assert device.arrays_bytes == whole.arrays_bytes == 3 * own.arrays_bytes


def test_the_error_of_a_run_without_room_names_no_arrays_of_other_tenants() -> None:
    stage = Stage()
    sessions = stage.world.control.sessions
    holders = [(client_id(stage.numbers[name], 7), 1 << 20) for name in ("red", "blue")]
    error = ErrorReport("OutOfDeviceMemory", "no room", "", "")
    told = with_holders(sessions, stage.blue.number, error, holders).message
    assert "red" not in told
    assert "1.00 MiB of other tenants" in told or "1 MiB of other tenants" in told
    told = with_holders(sessions, stage.scarlet.number, error, holders).message
    assert "(client 1, red)" in told


def test_records_name_the_programs_of_the_reader_s_tenant_only() -> None:
    stage = Stage()
    readers = (stage.scarlet, stage.blue, stage.op)
    for client in readers:
        assert stage.ask(client, msg.ReadRecords(1, 1), msg.Records).names == ()
    recorder = stage.world.recorders[CONTROLLER]
    stage.work(stage.red)
    for client in readers:
        names = [
            name
            for _, name in stage.ask(client, msg.ReadRecords(1, 2, stop=True), msg.Records).names
        ]
        assert names == (["", "i"] if client is stage.blue else ["chain", "i"])
    assert not recorder.on
    place, program = recorder.name("step", RED, "0,1 "), recorder.name("step", RED)
    public, other = recorder.name("h0"), recorder.name("step", BLUE, "0,1 ")
    assert len({place, program, public, other}) == 4
    known = recorder.names(0, BLUE)[-4:]
    assert known == ((place, "0,1 "), (program, ""), (public, "h0"), (other, "0,1 step"))


def test_hosts_know_whose_the_programs_are_that_they_record() -> None:
    stage = Stage()
    stage.work(stage.red)
    programs = stage.host.executor.programs
    assert {program.tenant for program in programs.values()} == {RED}


# --- numbers --------------------------------------------------------------------------------------


def test_a_claim_is_for_one_number_and_one_tenant() -> None:
    claims, later, other = Claims(b"secret"), Claims(b"secret"), Claims(b"another")
    claim = claims.claim(7, RED)
    assert later.is_valid(claim, 7, RED)
    assert not later.is_valid(claim, 7, BLUE)
    assert not later.is_valid(claim, 8, RED)
    assert not later.is_valid(b"", 7, RED)
    assert not later.is_valid(claim, -7, RED)
    assert not other.is_valid(claim, 7, RED)


def restarted(stage: Stage) -> None:
    """Another controller takes the place of the first."""
    stage.world.kill(CONTROLLER)
    stage.world.controller(first_client=1000)
    stage.world.settle()


def test_a_client_gets_its_number_back_with_its_claim_and_a_stranger_does_not() -> None:
    stage = Stage()
    (attached,) = stage.red.of(msg.Attached)
    (blues,) = stage.blue.of(msg.Attached)
    restarted(stage)
    world = stage.world
    for client, claim in ((stage.blue, attached.claim), (stage.blue, blues.claim)):
        client.tell(msg.Attach("blue", 1.0, 0, stage.red.number, claim))
        world.settle()
        assert "proof" in client.of(msg.Evicted)[-1].reason
    assert world.control.sessions.get(attached.client) is None
    assert "proven that it was client 1" in str(dict(world.audited)["refused"]["reason"])
    stage.scarlet.tell(msg.Attach("scarlet", 1.0, 0, attached.client, b""))
    world.settle()
    assert stage.scarlet.of(msg.Evicted)
    stage.red.tell(msg.Attach("red", 1.0, 0, attached.client, attached.claim))
    world.settle()
    assert stage.red.of(msg.Attached)[-1].client == attached.client
    assert world.client(attached.client).tenant == RED


def test_a_client_whose_connection_was_lost_before_it_told_anything_may_come_back() -> None:
    """It gave up waiting for a controller that was slow to begin, and called again."""
    stage = Stage()
    red, world = stage.red, stage.world
    (attached,) = red.of(msg.Attached)
    restarted(stage)

    def lose() -> None:
        for actor in world.actors[CONTROLLER]:
            to = Address(CONTROLLER, actor)
            world.post(to, to, msg.PeerLost(red.env.address.node, "connection lost"))
        world.settle()

    def attach() -> None:
        red.tell(msg.Attach("red", 1.0, 0, attached.client, attached.claim))
        world.settle()

    attach()
    lose()
    assert world.control.sessions.get(attached.client) is None
    attach()
    assert not red.of(msg.Evicted)
    assert world.client(attached.client).resuming is not None
    red.tell(msg.Resumed((), Compact.of(msg.KnownArrays(())), (), ()))
    world.settle()
    lose()
    attach()
    assert "given up" in red.of(msg.Evicted)[-1].reason


def test_a_client_that_comes_back_tells_of_its_own_arrays_only() -> None:
    stage = Stage()
    (attached,) = stage.red.of(msg.Attached)
    own, others = client_id(attached.client, 90), client_id(stage.blue.number, 90)
    restarted(stage)
    red, spec = stage.red, split(client_id(attached.client, 1), 1)
    red.tell(msg.Attach("red", 1.0, 0, attached.client, attached.claim))
    red.tell(msg.CreateArray(others, spec))
    red.tell(
        msg.Run(client_id(attached.client, 95), 0, (others,), (client_id(attached.client, 96),))
    )
    known = Compact.of(msg.KnownArrays((msg.KnownArray(others, spec), msg.KnownArray(own, spec))))
    red.tell(msg.Resumed((own, others), known, (), (others,)))
    stage.world.settle()
    client = stage.world.client(attached.client)
    assert others not in client.lineage.origins
    assert {number for number, _ in client.arrays.all()} <= {own}


def test_reports_of_schedulers_lose_the_work_of_others() -> None:
    works = [msg.WorkReport(client_id(n, 1), 0, "p", ("c",), ("h",), ((),), 1.0) for n in (1, 2)]
    installing = tuple(msg.InstallReport(client_id(n, 2), "q", ("h",)) for n in (1, 2))
    report = msg.IslandReport(0, "i", ("h",), 0.0, 2, 2, tuple(works), tuple(works), installing)
    facts = msg.Explanation(0, "", (), (report,), (), (), ())
    (left,) = visible(facts, lambda number: number == 1).work
    assert (left.oldest, left.heads, left.installing) == ((works[0],), (works[0],), installing[:1])
    assert (left.launched, left.queued) == (2, 2)


def test_reports_of_hosts_lose_the_threads_that_work_for_others() -> None:
    threads = tuple(msg.ThreadReport("pw-python", f"f{n}", 1.0, ("f.py:1",), n) for n in range(3))
    report = msg.HostReport(0, "h", "", 0.0, 0, (), (), threads)
    assert visible(report, lambda number: number == 1).threads == (threads[1],)
    assert visible(report, lambda number: True).threads == threads


def structs_in(kind: object) -> Iterator[type[msgspec.Struct]]:
    """A type, and the types of its fields, if they are structs."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
        kind = tuple(typing.get_type_hints(kind).values())
    for inner in kind if isinstance(kind, tuple) else typing.get_args(kind):
        yield from structs_in(inner)


def test_parts_of_reports_that_name_a_client_say_that_they_are_the_client_s() -> None:
    owned = set()
    for kind in {*structs_in(msg.Explanation), *structs_in(msg.Memory)} - {msg.OwnerMemory}:
        hints = typing.get_type_hints(kind, include_extras=True)
        for name in hints.keys() & {"run", "program", "client", "array"}:
            marks = typing.get_args(hints[name])
            if any(isinstance(mark, OwnerMark) for mark in marks):
                owned.add(kind)
        named = typing.get_type_hints(kind).items() & {("run", int), ("client", int)}
        assert kind in owned or not named, f"{kind.__name__} may show what other tenants do"
    assert len(owned) == 8
