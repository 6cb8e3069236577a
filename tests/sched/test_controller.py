"""Clients, what they own, and what becomes of runs that cannot be."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from pw.core import messages as msg
from pw.core.compact import Compact
from pw.core.errors import ErrorReport
from pw.core.ids import CONTROL, Address, executor_of
from pw.core.messages.checks import beyond_bounds
from pw.core.programs.program import Node, Output, Program, ValueRef
from pw.sched.control import uploads
from pw.sched.control.client_order import AT_ONCE
from pw.sched.control.runs import CREDITS_S
from tests.stages.actors import FakeHost, World
from tests.stages.samples import parts
from tests.stages.scripted import LARGE, SMALL, Client, chain, copy, digest, join, split

X = np.arange(SMALL)


class Stage:
    """One island of two hosts and one client with a slice."""

    def __init__(self, seed: int = 0, credits_at_once: int = 1) -> None:
        self.world = World(seed)
        self.world.controller(credits_at_once=credits_at_once)
        self.hosts: list[FakeHost] = [self.world.host(f"h{rank}", "i", 2) for rank in range(2)]
        self.world.settle()
        self.client, self.slice = self.join("c")
        self.spec = split(self.slice, 2)

    def join(self, name: str) -> tuple[Client, int]:
        client = join(self.world, name)
        number = client.slice(2)
        self.world.settle()
        return client, number

    def deliver(self, *route: str) -> None:
        """Let only what is on the links between these nodes arrive, in this order."""
        for source, node in zip(route[::2], route[1::2], strict=True):
            while self.world.links[source, node]:
                self.world.deliver(source, node)

    def failure(self, array: int) -> ErrorReport:
        self.world.settle()
        found = self.client.value(array)
        assert isinstance(found, ErrorReport), found
        return found

    def check_idle(self) -> None:
        self.world.settle()
        assert not self.world.control.runs.in_flight
        for client in self.world.control.sessions.clients:
            assert self.world.client(client.number).usage.runs == 0
        assert self.client.credits == self.client.sent_runs


def test_credits_are_given_back_many_at_once_or_after_a_moment() -> None:
    stage = Stage(credits_at_once=3)
    client = stage.client
    program = client.program(chain([stage.spec]))
    x = client.upload(X, stage.spec)

    def given_back(runs: int) -> list[int]:
        for _ in range(runs):
            client.run(program, x)
            stage.world.settle()
        return [message.count for message in client.of(msg.RunsSettled)]

    assert given_back(2) == []
    assert given_back(1) == [3]
    assert given_back(1) == [3]
    stage.world.wait(CREDITS_S)
    assert given_back(0) == [3, 1]
    stage.check_idle()


def test_a_refused_run_poisons_all_that_comes_of_it_with_one_and_the_same_error() -> None:
    stage = Stage()
    client = stage.client
    broken = client.program(chain([stage.spec], b"nocompile"), b"nocompile")
    good = client.program(chain([stage.spec]))
    (array,) = client.run(broken, X)
    arrays = [array]
    for _ in range(3):
        arrays += client.run(good, arrays[-1])
    errors = [stage.failure(array) for array in arrays]
    assert errors[0].kind == "CompileError"
    assert errors[0].where in ("h0", "h1")
    assert errors == [errors[0]] * 4
    (fine,) = client.run(good, X)
    np.testing.assert_array_equal(client.value(fine), X + 1)
    stage.check_idle()


def test_a_computation_that_raises_poisons_what_reads_it() -> None:
    stage = Stage()
    raising = stage.client.program(chain([stage.spec], b"raise"), b"raise")
    good = stage.client.program(chain([stage.spec]))
    (y,) = stage.client.run(raising, X)
    (z,) = stage.client.run(good, y)
    assert stage.failure(z) == stage.failure(y)
    assert stage.failure(z).kind == "ComputationFailed"
    stage.check_idle()


@pytest.mark.parametrize(
    ("args", "results", "kind"),
    [
        ((X.tobytes(),), 2, "ArgumentError"),
        ((), 1, "ArgumentError"),
        ((b"too short",), 1, "ArgumentError"),
        (("theirs",), 1, "NotOwner"),
        (("deleted",), 1, "ArrayDeleted"),
        (("elsewhere",), 1, "ArgumentError"),
    ],
)
def test_runs_that_are_refused(args: tuple[Any, ...], results: int, kind: str) -> None:
    stage = Stage()
    client = stage.client
    program = client.program(chain([stage.spec]))
    other, slice_ = stage.join("other")
    theirs = other.upload(X, split(slice_, 2))
    (deleted,) = client.run(program, X)
    client.delete(deleted)
    elsewhere = client.upload(X, split(stage.slice, 1))
    stage.world.settle()
    named = {"theirs": theirs, "deleted": deleted, "elsewhere": elsewhere}
    made = tuple(client.id() for _ in range(results))
    client.sent_runs += 1
    client.tell(msg.Run(client.id(), program, tuple(named.get(a, a) for a in args), made))
    stage.world.settle()
    assert {client.failed[array].kind for array in made} == {kind}
    np.testing.assert_array_equal(other.value(theirs), X)
    stage.check_idle()


def test_another_clients_programs_and_slices_are_not_ones_own() -> None:
    stage = Stage()
    other, slice_ = stage.join("other")
    theirs = other.program(chain([split(slice_, 2)]))
    stage.client.outputs[theirs] = (stage.spec,)
    (stolen,) = stage.client.run(theirs, X)
    squatting = stage.client.program(chain([split(slice_, 2)]))
    (squatted,) = stage.client.run(squatting, X)
    unknown = stage.client.id()
    stage.client.outputs[unknown] = (stage.spec,)
    (nothing,) = stage.client.run(unknown, X)
    stage.world.settle()
    for array in (stolen, squatted, nothing):
        assert stage.client.failed[array].kind == "NotOwner"
    number = stage.client.id()
    stage.client.tell(msg.CreateArray(number, split(slice_, 2)))
    stage.world.settle()
    assert stage.client.failed[number].kind == "NotOwner"
    stage.check_idle()


def test_a_program_that_names_no_placement_is_not_registered() -> None:
    stage = Stage()
    client, program = stage.client, stage.client.id()
    body = msgspec.structs.replace(Compact.of(chain([stage.spec])), placements=())
    client.outputs[program] = (stage.spec,)
    client.tell(msg.RegisterProgram(program, body, ()))
    (nothing,) = client.run(program, X)
    stage.world.settle()
    assert client.failed[nothing].kind == "ProtocolError"
    (y,) = client.run(client.program(chain([stage.spec])), X)
    np.testing.assert_array_equal(client.value(y), X + 1)
    stage.check_idle()


def test_equal_specs_of_a_client_are_one_object() -> None:
    """At every run each argument is compared with what its program takes, and a spec names all its devices."""
    stage = Stage()
    client = stage.client
    x = client.upload(X, split(stage.slice, 2))
    for _ in range(2):
        program = client.program(chain([split(stage.slice, 2)]))
        (x,) = client.run(program, x)
    stage.world.settle()
    (owner,) = stage.world.control.sessions.clients
    bodies = [program.body for program in owner.programs.values()]
    specs = [array.spec for array in owner.arrays.held.values()]
    specs += [spec for body in bodies for spec in body.inputs + body.computations[0].outputs]
    specs += [output.spec for body in bodies for output in body.outputs]
    assert len(specs) == 3 + 4 + 2
    assert len(set(map(id, specs))) == 1


def test_a_run_that_comes_twice_runs_once() -> None:
    stage = Stage()
    program = stage.client.program(chain([stage.spec]))
    stage.client.run(program, X)
    (_, to, run), *_ = [sent for sent in stage.world.sent if isinstance(sent[2], msg.Run)]
    stage.client.env.send(to, run)
    stage.check_idle()
    assert len(stage.world.to(executor_of("h0"), msg.Launch)) == 1


def test_a_program_without_outputs_settles() -> None:
    stage = Stage()
    body = chain([stage.spec])
    silent = Program("silent", body.computations, body.nodes, body.inputs, ())
    program = stage.client.program(silent)
    assert stage.client.run(program, X) == []
    nothing = stage.client.program(Program("nothing", (), (), (), ()))
    assert stage.client.run(nothing) == []
    stage.check_idle()


def test_a_donated_array_is_gone_and_may_be_given_twice() -> None:
    stage = Stage()
    client = stage.client
    x = client.upload(X, stage.spec)
    body = chain([stage.spec], donated=(0,))
    nodes = (Node(0, (ValueRef(-1, 0),)), Node(0, (ValueRef(-1, 1),)))
    outputs = tuple(Output(ValueRef(node, 0), stage.spec) for node in (0, 1))
    twice = Program("twice", body.computations, nodes, body.inputs * 2, outputs, (0,))
    program = client.program(body)
    both = client.program(twice)
    first, second = client.run(both, x, x)
    for array in (first, second):
        np.testing.assert_array_equal(client.value(array), X + 1)
    (z,) = client.run(program, x)
    assert stage.failure(z).kind == "ArrayDeleted"
    client.delete(first, second, z)
    client.release(program), client.release(both)
    stage.check_idle()
    assert all(not any(host.census().values()) for host in stage.hosts)


def test_a_run_names_each_of_its_results_once() -> None:
    stage = Stage()
    client = stage.client
    both = chain([stage.spec])
    outputs = (Output(ValueRef(0, 0), stage.spec),) * 2
    program = client.program(Program("both", both.computations, both.nodes, both.inputs, outputs))
    array = client.id()
    client.sent_runs += 1
    client.tell(msg.Run(client.id(), program, (X.tobytes(),), (array, array)))
    stage.world.settle()
    assert client.failed[array].kind == "ProtocolError"
    stage.check_idle()


def test_a_program_that_donates_what_it_does_not_take_fails_its_runs() -> None:
    stage = Stage()
    client = stage.client
    body = chain([stage.spec], donated=(-100,))
    (y,) = client.run(client.program(body), X)
    assert stage.failure(y).kind == "ArgumentError"
    stage.check_idle()


def test_a_run_that_cannot_be_takes_away_what_was_donated_to_it() -> None:
    """Its client has let go of that with the call, and never speaks of it again."""
    stage = Stage()
    client = stage.client
    broken = chain([stage.spec], b"nocompile", donated=(0,))
    x, y = client.upload(X, stage.spec), client.upload(X, stage.spec)
    (z,) = client.run(client.program(broken, b"nocompile"), x)
    both = Program("both", (), (), (stage.spec,) * 2, (Output(ValueRef(-1, 1), stage.spec),), (0,))
    (w,) = client.run(client.program(both), y, client.id())
    assert stage.failure(z).kind == "CompileError"
    assert stage.failure(w).kind == "ArrayDeleted"
    assert stage.world.client(client.number).arrays.held.keys() == {z, w}
    assert [host.census()["live_arrays"] for host in stage.hosts] == [0, 0]
    stage.check_idle()


@pytest.mark.parametrize("seeds", parts(range(25), 8))
@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("how", ["donated", "deleted", "used"])
def test_arrays_may_be_given_away_before_their_upload_has_ended(
    seeds: list[int], how: str, inline: bool
) -> None:
    for seed in seeds:
        stage = Stage(seed)
        client = stage.client
        spec = split(stage.slice, 2, LARGE)
        x = np.arange(LARGE)
        program = client.program(chain([spec], donated=(0,) if how == "donated" else ()))
        stage.world.steps(seed)
        array = client.upload(x, spec, inline)
        (y,) = client.run(program, array)
        unused = client.upload(x, spec, inline)
        client.delete(unused, *([array] if how == "deleted" else []))
        np.testing.assert_array_equal(client.value(y), x + 1)
        client.delete(y, array)
        client.release(program)
        stage.check_idle()
        assert all(not any(host.census().values()) for host in stage.hosts)
        assert not client.env.world.client(client.number).arrays.discarded


def test_an_upload_may_end_before_the_controller_has_heard_of_it() -> None:
    """The two come by different links."""
    for backlogged in (False, True):
        stage = Stage()
        client = stage.client
        program = client.program(chain([stage.spec]))
        if backlogged:  # a run that waits for the compiler holds up what is behind it
            stage.deliver("c", "controller")
            client.run(program, X)
        array = client.upload(X, stage.spec)
        (y,) = client.run(program, array)
        if backlogged:
            stage.deliver("c", "controller")
        for host in ("h0", "h1"):
            stage.deliver("c", host)
            while stage.world.backends[host].queue:
                stage.world.backends[host].step()
            while stage.world.happenings[host]:
                stage.world._happen(host)
            uploaded = [m for _, to, m in stage.world.sent if isinstance(m, msg.Uploaded)]
            assert uploaded
        stage.deliver("h0", "controller", "h1", "controller")
        np.testing.assert_array_equal(client.value(y), X + 1)
        stage.check_idle()
        assert not stage.world.client(client.number).arrays.unannounced


def test_an_upload_that_fails_fails_the_runs_that_wait_for_it() -> None:
    """On all hosts alike, whatever part of it was well: no host enqueues what another does not."""
    stage = Stage()
    client = stage.client
    program = client.program(chain([stage.spec]))
    stage.world.settle()
    array = client.id()
    client.specs[array] = stage.spec
    client.tell(msg.CreateArray(array, stage.spec))
    devices, place = client.devices(stage.spec), client.place(stage.spec)
    client.tell_host("h0", msg.Upload(array, stage.spec, devices, X[:4].tobytes(), *place))
    (y,) = client.run(program, array)
    (z,) = client.run(program, y)
    stage.world.settle()
    client.tell_host("h1", msg.Upload(array, stage.spec, devices, b"short", *place))
    stage.world.settle()
    assert client.failed[y].kind == "ProtocolError"
    assert client.failed[z] == client.failed[y]
    assert not any(host.backend.executed for host in stage.hosts)
    stage.check_idle()


def test_arrays_that_are_deleted_and_never_uploaded_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uploads, "DISCARDED_KEPT", 5)
    stage = Stage()
    client = stage.client
    program = client.program(chain([stage.spec]))
    arrays = [client.id() for _ in range(20)]
    for array in arrays:
        client.specs[array] = stage.spec
        client.tell(msg.CreateArray(array, stage.spec))
        if array == arrays[0]:
            (y,) = client.run(program, array)
        client.delete(array)
        stage.world.settle()
        assert len(stage.world.client(client.number).arrays.discarded) <= 6
    assert stage.failure(y).kind == "ProtocolError"
    late = client.upload(X, stage.spec)
    np.testing.assert_array_equal(client.value(client.run(program, late)[0]), X + 1)


@pytest.mark.parametrize("seeds", parts(range(20), 8))
def test_deletes_do_not_overtake_runs_that_wait_for_the_compiler(seeds: list[int]) -> None:
    for seed in seeds:
        stage = Stage(seed)
        client = stage.client
        program = client.program(chain([stage.spec] * 3))
        x = client.upload(X, stage.spec)
        (y,) = client.run(program, x)
        client.delete(x)
        (z,) = client.run(program, y)
        client.delete(y)
        client.release(program)
        np.testing.assert_array_equal(client.value(z), X + 6)
        client.delete(z)
        stage.check_idle()
        assert all(not any(host.census().values()) for host in stage.hosts)


@pytest.mark.parametrize("first", ["offer", "take"])
def test_what_a_client_was_about_to_offer_ends_with_it(first: str) -> None:
    """The importer hears at once that it will not come."""
    stage = Stage()
    exporter, world, token = stage.client, stage.world, b"t" * 16
    importer, slice_ = stage.join("importer")
    (y,) = exporter.run(exporter.program(chain([stage.spec])), X)  # it waits for the compiler
    exporter.tell(msg.Offer(exporter.id(), token, (y,), (stage.spec,)))
    stage.deliver("c", "controller")

    def leave() -> None:
        world.kill("c")
        stage.deliver("c", "controller")

    if first == "offer":
        leave()
    array, spec = importer.id(), split(slice_, 2)
    importer.tell(msg.CreateArray(array, spec, 1, msg.OfferSource(token, 0)))
    stage.deliver("importer", "controller")
    if first == "take":
        leave()
    world.settle()
    assert "has ended" in importer.failed[array].message


def test_what_reads_an_array_of_another_client_waits_in_its_stream() -> None:
    """On an island it could stand before a run of its client that the exporter needs first."""
    stage = Stage()
    exporter, world, token = stage.client, stage.world, b"t" * 16
    importer, slice_ = stage.join("importer")
    array, spec = importer.id(), split(slice_, 2)
    program = importer.program(chain([spec]))
    world.settle()
    importer.tell(msg.CreateArray(array, spec, 1, msg.OfferSource(token, 0)))
    importer.run(program, array)
    world.settle()
    assert len(world.client(importer.number).stream) == 1
    x = exporter.upload(X, stage.spec)
    exporter.tell(msg.Offer(exporter.id(), token, (x,), (stage.spec,)))
    world.settle()
    assert not world.client(importer.number).stream


def test_who_asks_for_an_array_of_another_client_hears_when_it_has_come() -> None:
    """Its hosts do not know before that it comes, so the client would ask them in vain."""
    stage = Stage()
    exporter, world, token = stage.client, stage.world, b"t" * 16
    importer, slice_ = stage.join("importer")
    array, spec, request = importer.id(), split(slice_, 2), importer.id()
    program = importer.program(chain([spec]))
    importer.tell(msg.CreateArray(array, spec, 1, msg.OfferSource(token, 0)))
    importer.tell(msg.Inquire(request, (array,)))
    (y,) = importer.run(program, X)
    world.settle()
    world.wait(1)
    np.testing.assert_array_equal(importer.value(y), X + 1)
    assert not importer.of(msg.Answered)
    x = exporter.upload(X, stage.spec)
    exporter.tell(msg.Offer(exporter.id(), token, (x,), (stage.spec,)))
    world.settle()
    assert importer.of(msg.Answered) == [msg.Answered(request, None)]


@pytest.mark.parametrize("gives_back", [False, True])
def test_what_is_handed_on_before_it_has_come_does_not_hold_up_its_client(gives_back: bool) -> None:
    """Both hand on an array that one of them offers last, and behind those in its stream."""
    stage = Stage()
    one, world, tokens = stage.client, stage.world, [bytes([at]) * 16 for at in range(3)]
    other, slice_ = stage.join("other")
    here, there = stage.spec, split(slice_, 2)
    mine, theirs, back = one.id(), other.id(), one.id()
    world.settle()
    one.tell(msg.CreateArray(mine, here, 1, msg.OfferSource(tokens[0], 0)))
    one.tell(msg.Offer(one.id(), tokens[1], (mine,), (here,)))
    other.tell(msg.CreateArray(theirs, there, 1, msg.OfferSource(tokens[1], 0)))
    other.tell(msg.Offer(other.id(), tokens[2], (theirs,), (there,)))
    if gives_back:
        one.delete(mine)
        one.tell(msg.ReleaseSlice(here.placement.slice))
    else:
        one.tell(msg.CreateArray(back, here, 1, msg.OfferSource(tokens[2], 0)))
    world.settle()
    assert len(world.client(one.number).stream) == gives_back, "its devices are still needed"
    x = other.upload(X, there)
    other.tell(msg.Offer(other.id(), tokens[0], (x,), (there,)))
    world.settle()
    assert not any(world.client(each.number).stream for each in (one, other))
    arrays = [(other, theirs, there)] if gives_back else [(one, back, here), (one, mine, here)]
    for client, array, spec in arrays:
        client.specs[array] = spec
        np.testing.assert_array_equal(client.value(array), X)
    if gives_back:
        assert here.placement.slice not in world.client(one.number).slices.owned


def test_a_long_backlog_goes_on_over_several_turns() -> None:
    """Messages of others have their turns between."""
    stage = Stage()
    client, world = stage.client, stage.world
    (y,) = client.run(client.program(chain([stage.spec])), X)  # it waits for the compiler
    asked = range(1, 2 * AT_ONCE + 1)
    for request in asked:
        client.tell(msg.Inquire(request, (y,)))
    stage.deliver("c", "controller")
    backlog = world.client(client.number).stream.backlog
    assert len(backlog) == 1 + len(asked)
    client.tell(msg.Cancel((y,)))
    stage.deliver("c", "controller")
    assert len(backlog) == AT_ONCE
    world.wait(0)
    assert not backlog
    assert [answer.request for answer in client.of(msg.Answered)] == list(asked)


@pytest.mark.parametrize("seeds", parts(range(20), 8))
def test_two_islands_drop_an_array_each_when_its_users_there_have_gone(seeds: list[int]) -> None:
    for seed in seeds:
        stage = Stage(seed)
        stage.hosts += [stage.world.host(f"k{rank}", "k", 2) for rank in range(2)]
        stage.world.settle()
        client = stage.client
        there = split(client.slice(2, "k"), 2)
        stage.world.settle()
        over, back = (
            client.program(copy(stage.spec, there)),
            client.program(copy(there, stage.spec)),
        )
        x = client.upload(X, stage.spec)
        (y,) = client.run(over, x)
        client.delete(x)
        (z,) = client.run(back, y)
        client.delete(y)
        np.testing.assert_array_equal(client.value(z), X)
        client.delete(z)
        client.release(over), client.release(back)
        stage.check_idle()
        assert all(not any(host.census().values()) for host in stage.hosts)


def test_who_is_not_known_is_told_so_and_changes_nothing() -> None:
    stage = Stage()
    program = stage.client.program(chain([stage.spec]))
    (y,) = stage.client.run(program, X)
    stage.world.settle()
    number = stage.client.number
    stage.world.post(Address("controller", "net"), CONTROL, msg.PeerLost("c", "silent"))
    stage.world.settle()
    assert all(not any(host.census().values()) for host in stage.hosts)
    stage.client.run(program, y)
    stage.client.tell(msg.Delete((y,)))
    stage.world.settle()
    assert len(stage.client.of(msg.Evicted)) == 2
    stage.client.tell(msg.Attach("again", 1.0, 0))
    stage.world.settle()
    assert stage.client.number > number


def test_a_slice_that_was_given_back_is_forgotten_and_its_client_told_so() -> None:
    stage = Stage()
    client, world = stage.client, stage.world
    program = client.program(chain([stage.spec]))
    (y,) = client.run(program, X)
    client.tell(msg.ReleaseSlice(stage.slice))
    np.testing.assert_array_equal(client.value(y), X + 1)
    assert client.of(msg.ReleaseSlice) == [msg.ReleaseSlice(stage.slice)]
    owner = world.client(client.number)
    assert not owner.slices.owned
    assert not owner.slices.times_bound
    client.delete(y)
    world.settle()
    assert not owner.slices.requests, "nothing can be made there again"
    world.host("h0", "i", 2)
    world.settle()
    assert len(client.of(msg.SliceBound)) == 1, "nothing more is said of it"
    assert not client.of(msg.SliceLost)


def test_an_artifact_is_kept_as_long_as_a_program_of_any_client_is_made_of_it() -> None:
    stage = Stage()
    client, world = stage.client, stage.world
    other, slice_ = stage.join("other")
    artifacts = world.control.registry.artifacts

    def known() -> set[bytes]:
        world.settle()
        world.sent.clear()  # the record of all messages
        return set(artifacts)

    program = client.program(chain([stage.spec], b"7"), b"7")
    theirs = other.program(chain([split(slice_, 2)], b"7"), b"7")
    assert known() == {digest(b"7")}
    held = [p.artifacts[0] for c in world.control.sessions.clients for p in c.programs.values()]
    assert held[0] is held[1], "the same bytes are there twice"
    del held
    client.release(program)
    assert known() == {digest(b"7")}
    again = other.id()  # without the artifact, which is there
    other.outputs[again] = other.outputs[theirs]
    other.tell(msg.RegisterProgram(again, Compact.of(chain([split(slice_, 2)], b"7")), ()))
    other.release(theirs)
    (y,) = other.run(again, X)
    np.testing.assert_array_equal(other.value(y), X + 7)
    other.release(again)
    assert known() == {digest(b"7")}, "what it made is still there, and may have to be made again"
    other.delete(y)
    assert known() == set()
    assert len(world.control.sessions.clients) == 2
    stage.check_idle()


@pytest.mark.parametrize("share", [0.0, -1.0, float("nan"), float("inf")])
def test_a_share_that_is_not_one_is_refused(share: float) -> None:
    error = beyond_bounds(msg.Attach("odd", share, 0))
    assert error is not None
    assert error.kind == "ArgumentError"
    assert "`share`" in error.message


def test_answers_of_an_old_epoch_are_dropped() -> None:
    stage = Stage()
    program = stage.client.program(chain([stage.spec]))
    stage.world.settle()
    stale = stage.world.counters["messages_stale"]
    scheduler = Address("controller", "scheduler/i")
    stage.world.post(executor_of("h0"), scheduler, msg.Installed(0, program, None))
    stage.world.settle()
    assert stage.world.counters["messages_stale"] == stale + 1
    assert digest(b"1") in stage.world.control.registry.artifacts
    assert not stage.world.to(executor_of("h0"), msg.Discard)
    assert stage.client.of(msg.RunFailed) == stage.client.of(msg.RunsSettled) == []
