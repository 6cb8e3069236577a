"""Names at the controller: whose they are, who may read, and what clients may not do."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pw.core import messages as msg
from pw.core.errors import ErrorReport
from pw.core.ids import CONTROL
from pw.core.rights import NewRights, Rights, TenantRights
from pw.sched.control.lookups import WAITING
from pw.sched.control.names import NAMES
from pw.sched.control.versions import VERSION
from tests.sched.test_tenants import Stage
from tests.stages.scripted import Client, split


class NameStage(Stage):
    """Clients of the tenants red and blue, and an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 100

    def request(self) -> int:
        self.requests += 1
        return self.requests

    def publish(self, client: Client, name: str, *to: str, keep_s: float = 0.0) -> int:
        """Publish a tree without arrays; return the version."""
        message = msg.Publish(self.request(), name, (), b"tree", keep_s, to)
        return int(self.ask(client, message, msg.Published).version)

    def look_up(self, client: Client, name: str, **how: Any) -> int | str:
        """The version of a name, or the kind of the error."""
        before = len(client.of(msg.VersionOffer)), len(client.of(msg.RequestFailed))
        client.tell(msg.Lookup(self.request(), name, **how))
        self.world.settle()
        self.world.wait(1.0)
        found = client.of(msg.VersionOffer)[before[0] :]
        failed = client.of(msg.RequestFailed)[before[1] :]
        assert len(found) + len(failed) == 1
        return int(found[0].version) if found else str(failed[0].error.kind)

    def names(self, client: Client) -> list[str]:
        answer = self.ask(client, msg.GetNames(self.request()), msg.NameList)
        return [f"{one.tenant}/{one.name}" for one in answer.names]


@pytest.mark.parametrize(
    ("to", "readers"),
    [
        ((), {"scarlet", "op"}),
        (("blue",), {"scarlet", "op", "blue"}),
        (("all",), {"scarlet", "op", "blue"}),
    ],
)
def test_a_name_is_read_by_its_tenant_and_by_those_it_names(
    to: tuple[str, ...], readers: set[str]
) -> None:
    stage = NameStage()
    assert stage.publish(stage.red, "base", *to) == 1
    for name in ("scarlet", "blue", "op"):
        client = getattr(stage, name)
        path = "base" if name == "scarlet" else "red/base"
        may = name in readers
        assert stage.look_up(client, path) == (1 if may else "NameNotFound")
        assert stage.names(client) == ["red/base"] * may
    assert stage.look_up(stage.blue, "base") == "NameNotFound", "it is no name of blue's tenant"


def test_tenants_have_names_of_their_own() -> None:
    stage = NameStage()
    stage.publish(stage.red, "base")
    stage.publish(stage.red, "base")
    assert stage.publish(stage.blue, "base", "all") == 1
    assert (stage.look_up(stage.scarlet, "base"), stage.look_up(stage.scarlet, "blue/base")) == (
        2,
        1,
    )
    assert stage.names(stage.op) == ["red/base", "blue/base"]


@pytest.mark.parametrize(
    ("who", "answer"), [("scarlet", None), ("op", None), ("blue", "AccessRefused")]
)
def test_a_name_is_ended_by_its_tenant_and_by_operators(who: str, answer: str | None) -> None:
    stage = NameStage()
    stage.publish(stage.red, "base", "blue", keep_s=math.inf)
    client, path = getattr(stage, who), "base" if who == "scarlet" else "red/base"
    client.tell(msg.Unpublish(stage.request(), path))
    stage.world.settle()
    if answer is None:
        assert [one.error for one in client.of(msg.Answered)][-1] is None
        assert stage.names(stage.red) == []
    else:
        assert client.of(msg.RequestFailed)[-1].error.kind == answer
        assert stage.names(stage.red) == ["red/base"]


@pytest.mark.parametrize("keep_s", [0.0, 60.0, math.inf])
def test_a_name_lasts_as_long_as_it_is_kept_after_its_maker(keep_s: float) -> None:
    stage = NameStage()
    stage.publish(stage.red, "base", keep_s=keep_s)
    stage.world.wait(100.0)
    assert stage.names(stage.scarlet) == ["red/base"], "while the maker is there, it stays"
    stage.world.post(CONTROL, CONTROL, msg.PeerLost("red", "closed"))
    stage.world.settle()
    assert stage.names(stage.scarlet) == ["red/base"] * bool(keep_s)
    stage.world.wait(30.0)
    assert stage.names(stage.scarlet) == ["red/base"] * bool(keep_s)
    stage.world.wait(31.0)
    assert stage.names(stage.scarlet) == ["red/base"] * (keep_s == math.inf)


def test_what_no_client_may_publish() -> None:
    stage = NameStage()
    red, blue = stage.red, stage.blue
    slice_ = red.slice(1)
    stage.world.settle()
    spec = split(slice_, 1)
    array = red.upload(np.arange(8), spec)
    stage.world.settle()

    def refused(client: Client, *offers: msg.Offer, name: str = "base") -> ErrorReport:
        message = msg.Publish(stage.request(), name, offers, b"")
        return stage.ask(client, message, msg.RequestFailed).error

    def offer(client: Client, number: int, of: Any = spec) -> msg.Offer:
        return msg.Offer(client.id(), client.id().to_bytes(16, "big"), (number,), (of,))

    assert refused(red, name="a/b").kind == "ArgumentError"
    assert refused(red, name="").kind == "ArgumentError"
    assert refused(red, msg.Offer(red.id(), bytes(16), (), ())).kind == "ArrayDeleted"
    assert refused(red, offer(red, array + 1000)).kind == "ArrayDeleted"
    assert refused(red, offer(red, array, split(slice_ + 1000, 1))).kind == "ArrayDeleted"
    assert refused(red, offer(red, array, split(slice_, 1, 16))).kind == "PlacementError"
    own = split(blue.slice(1), 1)
    stage.world.settle()
    assert refused(blue, offer(blue, array, own)).kind == "NotOwner"
    assert stage.names(stage.op) == []
    good = msg.Publish(stage.request(), "base", (offer(red, array),), b"")
    assert stage.ask(red, good, msg.Published).version > 0
    assert len(stage.world.control.sessions.clients) == 5, (
        "the holders of what was refused are gone"
    )


def test_names_and_lookups_have_bounds() -> None:
    stage = NameStage()
    for number in range(NAMES):
        stage.red.tell(msg.Publish(stage.request(), f"name-{number}", (), b""))
    stage.world.settle()
    message = msg.Publish(stage.request(), "one-more", (), b"")
    assert f"has {NAMES} names" in stage.ask(stage.red, message, msg.RequestFailed).error.message
    for _ in range(WAITING):
        stage.blue.tell(msg.Lookup(stage.request(), "none", wait_s=math.inf))
    assert stage.look_up(stage.blue, "none", wait_s=1.0) == "ArgumentError"


def test_the_table_of_versions_has_no_state_that_nothing_reaches() -> None:
    reached = {after for events in VERSION.table.values() for after in events.values()}
    assert set(VERSION.table) - reached == {next(iter(VERSION.table))}


def test_names_of_a_tenant_have_its_bound_and_its_readers_its_right() -> None:
    stage = NameStage()
    rights = TenantRights(named={"red": Rights(names=1, may_publish_to_all=False)})
    stage.world.post(CONTROL, CONTROL, NewRights(rights))
    stage.world.settle()
    stage.publish(stage.red, "base")
    assert stage.publish(stage.scarlet, "base") == 2, "it is the same name"
    for name, to, kind, words in (
        ("other", (), "QuotaExceeded", "1 name and may have 1 name"),
        ("base", ("all",), "AccessRefused", "may not publish 'base' to all"),
    ):
        refused = msg.Publish(stage.request(), name, (), b"tree", 0.0, to)
        error = stage.ask(stage.red, refused, msg.RequestFailed).error
        assert error.kind == kind
        assert words in error.message
    assert stage.publish(stage.blue, "other", "all") == 1
    unpublish = msg.Unpublish(stage.request(), "base")
    stage.red.tell(unpublish)
    stage.world.settle()
    assert stage.publish(stage.red, "other") == 1
