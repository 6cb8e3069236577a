"""Versions of names at the controller: their readers, their ends, their cost and their bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import pytest

from pw.client.session.journal import Journal
from pw.client.session.thread_messages import Allocate, Tell
from pw.core import messages as msg
from pw.core.errors import NameNotFound
from pw.core.ids import CONTROL, CONTROLLER
from pw.core.messages.names import VersionNumber
from pw.core.rights import NewRights, Rights, TenantRights
from pw.core.sharding import ArraySpec, Placement
from pw.sched.control.names import NameTable
from pw.sched.control.sessions import HOLDERS
from tests.sched.test_controller_restart import Cluster, User
from tests.sched.test_names import NameStage
from tests.stages.actors import World
from tests.stages.scripted import Client, chain, split


class VersionStage(NameStage):
    """Clients that publish arrays."""

    def array(self, client: Client, *, is_here: bool = True) -> tuple[int, ArraySpec]:
        """An array on a slice of its own; or one that is announced, and whose bytes do not come."""
        slice_ = client.slice(1)
        self.world.settle()
        spec = split(slice_, 1)
        if is_here:
            number = client.upload(np.arange(8), spec)
        else:
            number = client.id()
            client.tell(msg.CreateArray(number, spec))
        self.world.settle()
        return number, spec

    def publication(
        self, client: Client, name: str, array: tuple[int, ArraySpec], *to: str, **more: Any
    ) -> msg.Publish:
        number, spec = array
        offer = msg.Offer(client.id(), client.id().to_bytes(16, "big"), (number,), (spec,))
        return msg.Publish(self.request(), name, (offer,), b"tree", to=to, **more)

    def publish_arrays(self, client: Client, name: str, *to: str, **more: Any) -> int:
        message = self.publication(client, name, self.array(client), *to, **more)
        return int(self.ask(client, message, msg.Published).version)

    @property
    def scheduler(self) -> Any:
        """The scheduler of the island."""
        return next(
            one for name, one in self.world.actors[CONTROLLER].items() if "scheduler" in name
        )

    def holder(self, name: str) -> Any:
        """The client that owns what is published under a name."""
        clients = self.world.control.sessions.clients
        return next(client for client in clients if client.name == f"name {name!r}")

    @property
    def table(self) -> NameTable:
        return self.world.control.names


# --- rights ---------------------------------------------------------------------------------------


def test_a_version_is_read_by_those_it_names_not_by_those_a_later_one_names() -> None:
    stage = VersionStage()
    assert stage.publish_arrays(stage.red, "base") == 1
    assert stage.look_up(stage.scarlet, "base") == 1  # a reader: the version stays
    assert stage.publish_arrays(stage.red, "base", "blue") == 2
    assert stage.look_up(stage.blue, "red/base", version=1) == "NameNotFound"
    assert stage.look_up(stage.blue, "red/base") == 2
    assert stage.look_up(stage.scarlet, "base", version=1) == 1
    assert stage.look_up(stage.op, "red/base", version=1) == 1
    (info,) = stage.ask(stage.blue, msg.GetNames(stage.request()), msg.NameList).names
    assert (info.versions, info.to) == ((2,), ()), "blue sees what is for blue"
    (info,) = stage.ask(stage.scarlet, msg.GetNames(stage.request()), msg.NameList).names
    assert (info.versions, info.to) == ((1, 2), ("blue",))


# --- numbers --------------------------------------------------------------------------------------


def test_a_client_of_this_controller_does_not_choose_the_number_of_a_version() -> None:
    stage = NameStage()
    message = msg.Publish(stage.request(), "base", (), b"", version=1000)
    assert stage.ask(stage.red, message, msg.Published).version == 1


def test_a_publication_that_comes_twice_is_one_version() -> None:
    stage = NameStage()
    message = msg.Publish(stage.request(), "base", (), b"")
    for _ in range(2):
        stage.red.tell(message)
    stage.world.settle()
    assert [one.version for one in stage.red.of(msg.Published)] == [1]


def test_numbers_of_versions_are_bounded() -> None:
    assert msgspec.convert(1 << 53, VersionNumber) == 1 << 53
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert((1 << 53) + 1, VersionNumber)


def test_an_error_in_one_version_leaves_those_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = VersionStage()
    for name in ("first", "second"):
        array = stage.array(stage.red, is_here=False)
        stage.red.tell(stage.publication(stage.red, name, array))
    stage.world.settle()
    looks: list[str] = []

    def failing(shared: Any, version: Any) -> bool:
        looks.append(shared.name)
        if shared.name == "first":
            raise ZeroDivisionError
        return False

    monkeypatch.setattr(stage.table, "arrive", failing)
    monkeypatch.setattr("pw.sched.control.versions.Version.stands_still", False)
    with pytest.raises(ZeroDivisionError):
        stage.table.go_on()
    stage.table.go_on()
    assert looks == ["first", "second"]


# --- what a publisher keeps for another controller ------------------------------------------------


def publish(user: User, name: str, *arrays: int) -> Any:
    offers = tuple(
        msg.Offer(user.id(), user.id().to_bytes(16, "big"), (array,), (user.specs[array],))
        for array in arrays
    )
    return user.ask(lambda request: msg.Publish(request, name, offers, b"t"), *arrays)


def read(cluster: Cluster, reader: User, name: str, spec: ArraySpec) -> int:
    """Look up a name with one array of this spec, and take it; return its number there."""
    lookup = reader.ask(lambda request: msg.Lookup(request, name))
    cluster.time(2)
    (part,) = lookup.result(0).parts
    bound: Future[Any] = Future()
    like = msg.AllocateSlice(reader.id(), part.devices, None, None, None, like=part.slice)
    reader.note(Allocate(like, bound))
    cluster.time(2)
    placement = Placement(bound.result(0).slice, spec.placement.devices)
    number = reader.id()
    reader.specs[number] = msgspec.structs.replace(spec, placement=placement)
    source = msg.OfferSource(part.token, 0)
    reader.note(Tell(msg.CreateArray(number, reader.specs[number], source=source)))
    cluster.time(2)
    return number


def step_until(world: World, is_so: Callable[[], bool]) -> None:
    for _ in range(1000):
        if is_so():
            return
        world.steps(1)
    raise AssertionError("it does not happen")


def versions(cluster: Cluster, user: User) -> list[tuple[str, int]]:
    future = user.ask(msg.GetNames)
    cluster.time(5)
    return [(one.name, one.version) for one in future.result(0).names]


@pytest.mark.parametrize("has_arrays", [True, False])
@pytest.mark.parametrize("ends", ["publisher", "another session"])
def test_an_unpublished_name_does_not_come_back_with_another_controller(
    ends: str, has_arrays: bool
) -> None:
    cluster = Cluster(0)
    user, world = cluster.user, cluster.world
    another, reader = User(world, "d"), User(world, "e")
    for name in ("base", "other"):
        arrays = [user.put(cluster.x, cluster.a)] * has_arrays
        publication = publish(user, name, *arrays)
        cluster.time(5)
        assert publication.result(0).version == 1
    if has_arrays:  # the version stays for its reader
        own = read(cluster, reader, "base", cluster.a)
        np.testing.assert_array_equal(reader.value(own), cluster.x)
    end = (user if ends == "publisher" else another).ask(
        lambda request: msg.Unpublish(request, "base")
    )
    cluster.time(2)
    end.result(0)
    cluster.lose()
    world.wait(1.0)
    cluster.start()
    cluster.time(20)
    assert versions(cluster, user) == [("other", 1)]
    if has_arrays:
        np.testing.assert_array_equal(reader.value(own), cluster.x)


@pytest.mark.parametrize("is_last", [True, False])
def test_a_version_that_ended_while_it_arrived_is_told_of_no_more_and_has_an_answer(
    is_last: bool,
) -> None:
    cluster = Cluster(0)
    user, another = cluster.user, User(cluster.world, "d")
    slow = user.program(chain([cluster.a, cluster.b] * 8))
    publication = publish(user, "base", user.run(slow, user.put(cluster.x, cluster.a)))
    later = [] if is_last else [("other", 1)]
    for name, _ in later:
        publish(user, name, user.put(cluster.x, cluster.a))
    world, journal = cluster.world, user.session.link.journal
    step_until(world, lambda: len(world.control.names.directory.all()) > len(later))
    end = another.ask(lambda request: msg.Unpublish(request, "base"))
    step_until(world, lambda: len(journal.publications) == len(later))
    assert end.result(0) is None
    assert not publication.done(), "its array has not come"
    cluster.lose()
    cluster.time(2)
    cluster.start()
    cluster.time(20)
    assert versions(cluster, another) == later
    with pytest.raises(NameNotFound, match="'base' was ended"):
        publication.result(0)


def test_a_journal_keeps_only_versions_that_lookups_find() -> None:
    cluster = Cluster(0)
    user, journal = cluster.user, cluster.user.session.link.journal
    for arrays in ((), (user.put(cluster.x, cluster.a),), (), ()):
        publication = publish(user, "base", *arrays)
        cluster.time(5)
        publication.result(0)
    assert [one.version for one in journal.publications.values()] == [4]
    refused = publish(user, "no/name")
    cluster.time(5)
    assert refused.exception(0) is not None
    assert len(journal.publications) == 1


def test_a_forgotten_run_ends_the_publication_of_its_offer_alone() -> None:
    journal = Journal()
    forget = journal.handlers()[msg.ForgetRuns]
    offers = [msg.Offer(number, bytes(16), (), ()) for number in range(4)]
    for request, group in ((10, offers[:2]), (11, offers[2:])):
        journal.record(msg.Publish(request, "base", tuple(group), b""))
    forget(CONTROL, msg.ForgetRuns((1,)))
    assert list(journal.publications) == [11]
    forget(CONTROL, msg.ForgetRuns((0, 2)))
    assert not journal.publications


# --- what names cost ------------------------------------------------------------------------------


def test_idle_names_cost_a_turn_and_a_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = VersionStage()
    control, scheduler = stage.world.control, stage.scheduler
    callers = len(control.sessions.clients)
    for number in range(20):
        stage.publish(stage.red, f"empty-{number}")
    for number in range(4):
        stage.publish_arrays(stage.red, f"name-{number}")
    stage.world.wait(2.0)
    stage.world.settle()
    assert len(control.sessions.clients) == callers + 24
    visits: list[int] = []
    monkeypatch.setattr(control.stream, "go_on", lambda client: visits.append(client.number))
    looks: list[int] = []
    monkeypatch.setattr(
        "pw.sched.control.lineage.Lineage.has_unneeded", property(lambda one: looks.append(1))
    )
    control.turn_ended()
    assert visits == []
    assert len(looks) == 2 * callers, "the end of a turn looks at clients, and not at names"
    scheduler.turn_ended()
    assert len(scheduler.queues.clients) == callers + 24
    assert not scheduler.queues.busy


def test_a_holder_that_is_gone_is_not_served() -> None:
    stage = VersionStage()
    control = stage.world.control
    names = ("first", "second")
    for name in names:
        stage.publish_arrays(stage.red, name, keep_s=math.inf)
    first, second = map(stage.holder, names)
    red = control.sessions.at("red")
    assert red is not None
    released: list[int] = []

    def checkpoint(client: Any, message: msg.Checkpoint) -> None:
        released.append(client.number)
        stage.table.unpublish(red, msg.Unpublish(stage.request(), "second"))

    control.stream.set_handlers({msg.Checkpoint: checkpoint}, {})
    for holder in (first, second):
        holder.stream.backlog.append(msg.Checkpoint(0, ()))
        control.sessions.wake(holder.number)
    control.turn_ended()
    assert released == [first.number]


def test_what_a_holder_borrowed_is_given_back() -> None:
    """The end of a turn looks at a holder with a borrowed slice until it has none."""
    stage = VersionStage()
    stage.publish_arrays(stage.red, "base")
    sessions, holder = stage.world.control.sessions, stage.holder("base")
    assert sessions.busy() == []
    (own,) = holder.slices.owned
    holder.slices.borrowed.add(own)
    bound = next(m for _, to, m in stage.world.sent if type(m) is msg.SliceBound and m.slice == own)
    sessions.wake(0)
    assert not sessions.is_busy, "there is no such client"
    stage.table.slice_bound(CONTROL, bound)
    assert sessions.busy() == [holder]
    holder.slices.borrowed.clear()
    stage.world.control.turn_ended()
    assert sessions.busy() == []


def test_a_version_that_stands_still_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = VersionStage()
    array = stage.array(stage.red, is_here=False)
    stage.red.tell(stage.publication(stage.red, "base", array))
    stage.world.settle()
    looks: list[int] = []
    monkeypatch.setattr(stage.table, "arrive", lambda shared, one: looks.append(one.number))
    for _ in range(3):
        assert not stage.table.go_on()
    assert looks == []


# --- bounds ---------------------------------------------------------------------------------------


def test_a_request_that_waits_cannot_be_sent_again() -> None:
    stage = VersionStage()
    for _ in range(5):
        stage.blue.tell(msg.Lookup(7, "none", wait_s=1e9))
    stage.world.settle()
    alarms = len(stage.world.alarms)
    stage.blue.tell(msg.Lookup(7, "none", wait_s=1e9))
    stage.world.settle()
    assert len(stage.world.alarms) == alarms
    assert stage.world.counters["messages_duplicate"] == 5


@pytest.mark.parametrize("end", ["answered", "left"])
def test_a_lookup_that_has_ended_has_no_timer(end: str) -> None:
    stage = VersionStage()
    lookups = stage.world.control.lookups
    stage.scarlet.tell(msg.Lookup(7, "base", wait_s=1e9))
    stage.world.settle()
    (waiting,) = lookups.waiting[stage.scarlet.number].values()
    cancelled: list[bool] = []
    waiting.timer.cancel = lambda: cancelled.append(True)
    if end == "answered":
        stage.publish(stage.red, "base")
    else:
        stage.world.post(CONTROL, CONTROL, msg.PeerLost("scarlet", "closed"))
        stage.world.settle()
    assert cancelled == [True]
    assert not lookups.waiting


def test_offers_that_a_reader_does_not_take_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pw.sched.control.lookups.UNTAKEN", 3)
    stage = VersionStage()
    stage.publish_arrays(stage.red, "base", "blue")
    assert [stage.look_up(stage.blue, "red/base") for _ in range(4)] == [1, 1, 1, "ArgumentError"]
    assert stage.look_up(stage.scarlet, "base") == 1, "each reader has a bound of its own"
    for part in stage.blue.of(msg.VersionOffer)[0].parts:
        stage.table.handovers.withdraw(part.token)
    stage.world.settle()
    assert stage.look_up(stage.blue, "red/base") == 1


def test_versions_of_a_name_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pw.sched.control.names.VERSIONS", 3)
    stage = VersionStage()
    array = stage.array(stage.red, is_here=False)
    for _ in range(3):
        stage.red.tell(stage.publication(stage.red, "base", array))
    stage.world.settle()
    refused = stage.publication(stage.red, "base", array)
    error = stage.ask(stage.red, refused, msg.RequestFailed).error
    assert error.kind == "ArgumentError"
    assert "'base' has 3 versions" in error.message
    assert stage.publish_arrays(stage.scarlet, "other") == 1


def test_numbers_of_names_that_have_ended_are_kept_for_each_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pw.sched.control.directory.RECENT", 2)
    stage = VersionStage()

    def once(client: Client, name: str) -> int:
        version = stage.publish(client, name)
        client.tell(msg.Unpublish(stage.request(), name))
        stage.world.settle()
        return version

    assert once(stage.blue, "base") == 1
    assert [once(stage.red, f"name-{number}") for number in range(3)] == [1, 1, 1]
    assert once(stage.blue, "base") == 2
    assert (once(stage.red, "name-2"), once(stage.red, "name-0")) == (2, 1)


# --- replicas -------------------------------------------------------------------------------------


def test_a_name_without_room_for_replicas_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = VersionStage()
    rights = TenantRights(named={"red": Rights(host_memory=1)})
    stage.world.post(CONTROL, CONTROL, NewRights(rights))
    stage.world.settle()
    stage.publish_arrays(stage.red, "base", keep_s=math.inf)
    sent, lines = len(stage.world.sent), []
    monkeypatch.setattr(
        stage.world.control.env, "log", lambda *what, **fields: lines.append((what, fields))
    )
    stage.world.post(CONTROL, CONTROL, msg.PeerLost("red", "closed"))
    stage.world.settle()
    assert not [m for _, to, m in stage.world.sent[sent:] if to == HOLDERS]
    ((_, fields),) = [line for line in lines if line[0] == ("warning", "no replicas")]
    assert fields["of"] == "name 'base'"
    assert "host memory" in fields["why"]
