"""Clients that watch islands: whatever is lost on the way, they come to know the present state of each."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from pw.client.session.island_news import IslandChange, change
from pw.client.session.thread_messages import FollowIslands
from pw.core import messages as msg
from pw.core.errors import ErrorReport
from pw.core.ids import CONTROL, CONTROLLER, RESOURCES, Address
from pw.core.tenants import OPERATOR
from pw.core.waits import RECOVERY_S
from pw.sched.control.sessions import UNNAMED
from tests.sched.test_controller_restart import Cluster
from tests.stages.actors import World
from tests.stages.samples import some
from tests.stages.scripted import join, split

READY = msg.IslandState("a", 3, is_ready=True, hosts=("h",), devices=4)
AWAY = msg.IslandState("a", 3, is_ready=False, hosts=("h",), devices=4, reason="it fell")
GIVEN_UP = msg.IslandState("a", 3, is_ready=False, is_given_up=True, reason="it fell")
NEXT = msg.IslandState("a", 4, is_ready=True, hosts=("h",), devices=4)


@pytest.mark.parametrize(
    ("former", "state", "what"),
    [
        (None, READY, "joined"),
        (None, AWAY, "left"),
        (None, GIVEN_UP, "given_up"),
        (READY, READY, None),
        (READY, AWAY, "left"),
        (READY, GIVEN_UP, "given_up"),
        (READY, NEXT, "returned"),
        (AWAY, AWAY, None),
        (AWAY, GIVEN_UP, "given_up"),
        (AWAY, NEXT, "returned"),
        (GIVEN_UP, AWAY, None),
        (GIVEN_UP, GIVEN_UP, None),
        (GIVEN_UP, NEXT, "returned"),
    ],
)
def test_two_states_tell_what_has_happened(
    former: msg.IslandState | None, state: msg.IslandState, what: str | None
) -> None:
    assert change(former, state) == what


class Watched(Cluster):
    """A cluster whose user watches islands."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.changes: list[IslandChange] = []
        self.user.session.islands.on_change = self.changes.append
        self.user.note(FollowIslands(is_on=True))
        self.world.settle()

    def heard(self) -> list[tuple[str, str, int]]:
        """Return what the user has heard since the last look: island, what, epoch."""
        heard = [(one.state.island, one.what, one.state.epoch) for one in self.changes]
        self.changes.clear()
        return heard

    def ready(self) -> dict[str, int]:
        """Return the islands that are ready, and their epochs."""
        return {
            one.name: one.formed for one in self.world.resources.status({}) if one.state == "ready"
        }


def test_a_user_hears_of_each_change_once() -> None:
    cluster = Watched()
    assert all(one.is_present for one in cluster.changes)
    assert sorted(cluster.heard()) == [("a", "joined", 1), ("b", "joined", 1)]
    cluster.hosts["b0"].crash()
    cluster.world.settle()
    assert not any(one.is_present for one in cluster.changes)
    assert cluster.changes[0].state.reason.startswith("island 'b' stopped: host b0 was lost")
    assert cluster.heard() == [("b", "left", 1), ("b", "returned", 2)]


@pytest.mark.parametrize("patience_s", [None, 5.0])
def test_an_island_is_given_up_and_may_still_return(patience_s: float | None) -> None:
    cluster = Watched()
    cluster.world.client(cluster.user.number).recovery_s = patience_s
    cluster.heard()
    cluster.hosts["b0"].die()
    cluster.time((patience_s or RECOVERY_S) - 1)
    assert cluster.heard() == [("b", "left", 1)]
    cluster.time(2)
    assert cluster.heard() == [("b", "given_up", 1)]
    cluster.user.note(FollowIslands(is_on=True))  # one that begins now
    cluster.world.settle()
    assert sorted(cluster.heard()) == [("a", "joined", 1), ("b", "given_up", 1)]
    cluster.hosts["b0"].start()
    cluster.world.settle()
    assert cluster.heard() == [("b", "returned", 2)]


def test_other_tenants_do_not_hear_whose_call_ended_an_epoch() -> None:
    cluster = Watched()
    island = f"scheduler/{cluster.island_b}"
    other = join(cluster.world, "d")
    for tenant, words in (
        *((OPERATOR, "'train' has not ended"), ("owners", "'train' has not ended")),
        ("rivals", UNNAMED),
    ):
        client = cluster.world.client(cluster.user.number)
        client.tenant, cluster.world.client(other.number).tenant = tenant, "owners"
        cluster.changes.clear()
        epoch = cluster.ready()["b"]
        reason = msg.EndEpoch("b", epoch, "'train' has not ended", other.number)
        cluster.world.post(Address(CONTROLLER, island), RESOURCES, reason)
        cluster.world.settle()
        left, returned = cluster.changes
        assert (left.what, returned.what) == ("left", "returned")
        assert words in left.state.reason
    assert "train" not in left.state.reason


def test_an_island_is_never_given_up_for_a_client_that_waits_without_end() -> None:
    cluster = Watched()
    cluster.world.client(cluster.user.number).recovery_s = math.inf
    cluster.heard()
    cluster.hosts["b0"].die()
    cluster.time(2 * RECOVERY_S)
    assert cluster.heard() == [("b", "left", 1)]


def test_nothing_is_sent_where_nothing_listens() -> None:
    cluster = Watched()
    cluster.user.note(FollowIslands(is_on=False))
    cluster.world.settle()
    told = len(cluster.world.to(cluster.user.me, msg.IslandStates))
    cluster.hosts["b0"].crash()
    cluster.time(1)
    assert len(cluster.world.to(cluster.user.me, msg.IslandStates)) == told


def test_a_watch_ends_no_lease() -> None:
    cluster = Watched()
    stops: list[object] = []
    cluster.user.session.link.on_order = lambda: stops.append(None)
    cluster.user.note(FollowIslands(is_on=True))
    cluster.world.settle()
    assert not stops


def test_an_island_that_is_lost_with_the_controller_is_given_up() -> None:
    cluster = Watched()
    cluster.heard()
    cluster.lose()
    cluster.hosts["b0"].die()
    cluster.world.settle()
    cluster.start()
    cluster.time(5)
    # Island a was formed again; the controller has only the user's word that there was another one.
    assert sorted(cluster.heard()) == [("a", "left", 1), ("a", "returned", 2), ("b", "left", 1)]
    cluster.time(RECOVERY_S)
    assert cluster.heard() == [("b", "given_up", 1)]
    cluster.lose()
    cluster.start()
    cluster.time(RECOVERY_S + 5)
    assert "b" not in [island for island, _, _ in cluster.heard()], "it was given up before"


def test_the_timer_of_a_user_is_set_once() -> None:
    cluster = Watched()
    cluster.hosts["b0"].die()
    cluster.world.settle()
    waiting = len(cluster.world.alarms)
    for _ in range(5):
        cluster.world.post(cluster.user.me, CONTROL, msg.WatchIslands(is_on=True))
    cluster.world.settle()
    assert len(cluster.world.alarms) == waiting


def test_a_user_has_one_timer_whatever_it_names_and_none_when_it_is_gone() -> None:
    cluster = Watched()
    world, watches = cluster.world, cluster.world.control.watches
    waiting = len(world.alarms)
    for turn in range(5):
        names = tuple(f"n{turn}-{one}" for one in range(100))
        world.post(cluster.user.me, CONTROL, msg.WatchIslands(is_on=True, awaited=names))
        world.settle()
    assert len([one for one in world.alarms if not one.cancelled]) == waiting + 1
    told = len(world.to(cluster.user.me, msg.IslandStates))
    cluster.time(RECOVERY_S - 6)
    assert len(world.to(cluster.user.me, msg.IslandStates)) == told
    cluster.time(6 + 1)
    given_up = world.to(cluster.user.me, msg.IslandStates)[told:]
    assert [one.is_given_up for message in given_up for one in message.islands] == [True] * 100
    for what in ("looks away", "leaves"):
        world.post(cluster.user.me, CONTROL, msg.WatchIslands(is_on=True, awaited=("n",)))
        world.settle()
        (watch,) = watches.watches.values()
        timer = watch.timer
        assert not timer.cancelled
        if what == "looks away":
            world.post(cluster.user.me, CONTROL, msg.WatchIslands(is_on=False))
        else:
            world.post(CONTROL, CONTROL, msg.PeerLost(cluster.user.me.node, "closed"))
        world.settle()
        assert timer.cancelled
        assert not watches.watches


def test_no_error_of_a_lost_island_names_another_tenants_work() -> None:
    """Neither that of a slice, nor that of an array that is lost for good, nor what readers of names get."""
    world = World(1)
    world.controller()
    world.host("h0", "i", 2, 4)
    world.host("h1", "i", 2, 4)
    world.tenants = {"red": "red", "blue": "blue"}
    world.settle()
    red, blue = join(world, "red"), join(world, "blue")
    arrays = {}
    for client in (red, blue):
        world.client(client.number).recovery_s = 1.0
        number = client.id()
        client.tell(msg.AllocateSlice(number, 1, None, None, None))
        world.settle()
        arrays[client] = client.upload(np.arange(8), split(number, 1))
        world.settle()
    holder = world.control.sessions.hold("name 'x'", "red", ())
    ended = msg.EpochEnded("i", 1, ErrorReport("HostLost", "'train' has not ended"), "", red.number)
    assert UNNAMED in world.control.sessions.error_for(holder, ended).message
    reason = msg.EndEpoch("i", 1, "'train' has not ended", red.number)
    world.post(Address(CONTROLLER, "scheduler/i"), RESOURCES, reason)
    world.kill("h1")
    world.settle()
    world.wait(2.0)
    for client, words in ((red, "'train' has not ended"), (blue, UNNAMED)):
        (lost,) = client.of(msg.SliceLost)
        assert words in lost.error.message
        assert words in client.failed[arrays[client]].message
    assert "train" not in blue.failed[arrays[blue]].message


@pytest.mark.parametrize("seed", some(range(60), 10))
def test_a_user_knows_the_islands_in_the_end(seed: int) -> None:
    cluster, dice = Watched(seed), random.Random(f"watch {seed}")
    known: dict[str, int] = {}
    for _ in range(12):
        what = dice.randrange(4)
        if what == 0 and CONTROLLER not in cluster.world.dead:
            cluster.lose()
        elif what == 1 and CONTROLLER in cluster.world.dead:
            cluster.start()
        elif what == 2:
            cluster.hosts[dice.choice(("a0", "a1", "b0"))].crash()
        cluster.world.steps(dice.randrange(60))
        if dice.random() < 0.3:
            cluster.world.wait(dice.choice((0.5, 1.0, 20.0)))
    if CONTROLLER in cluster.world.dead:
        cluster.start()
    cluster.time(60)
    for one in cluster.changes:  # events alone tell the states
        if one.state.is_ready:
            assert known.get(one.state.island) != one.state.epoch
            known[one.state.island] = one.state.epoch
        else:
            known.pop(one.state.island, None)
    assert known == cluster.ready() == {"a": known["a"], "b": known["b"]}
