"""Hosts, islands, epochs and slices, as the resource manager keeps them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pw.core import messages as msg
from pw.core.errors import ErrorReport
from pw.core.ids import CONTROL, RESOURCES, SERVICES, Address, client_id, executor_of, session_of
from pw.core.sharding import DeviceAddress
from pw.core.waits import CLUSTER_START_S, MOVE_S
from pw.sched.cluster.epochs import REJOIN_S, RESTART_S
from pw.sched.cluster.manager import ResourceManager
from tests.stages.actors import TICKETS, Services, World


class Bench:
    """A resource manager, and words put into the mouths of hosts and of the controller."""

    def __init__(self, expected_islands: int = 1) -> None:
        self.world = World()
        self.manager: ResourceManager = self.world.add(
            RESOURCES,
            lambda env: ResourceManager(env, TICKETS.public, expected_islands=expected_islands),
        )
        self.world.add(SERVICES, Services)

    def say(self, sender: Address, message: object) -> None:
        self.world.mailboxes["controller"].append((sender, RESOURCES, message))
        self.world.drain("controller")

    def host(
        self,
        node: str,
        island: str = "i",
        hosts: int = 1,
        devices: int = 1,
        platform: str = "cpu",
        *,
        spare: bool = False,
        is_to_end: bool = False,
    ) -> None:
        said = msg.RegisterHost(
            *(island, hosts, devices, platform, f"at {node}", 7, spare), is_to_end=is_to_end
        )
        self.say(executor_of(node), said)

    def joined(self, node: str, epoch: int = 1, devices: int = 1, island: str = "i") -> None:
        self.say(executor_of(node), msg.IslandJoined(island, epoch, "kind", devices, None))

    def island(self, name: str, hosts: int, devices: int, epoch: int = 1) -> None:
        for rank in range(hosts):
            self.host(f"{name}{rank}", name, hosts, devices)
        for rank in range(hosts):
            self.joined(f"{name}{rank}", epoch, devices, name)

    def lose(self, node: str) -> None:
        self.say(RESOURCES, msg.PeerLost(node, "silent"))

    def ask(self, number: int, devices: int, **how: Any) -> Any:
        """What the controller is told of a new slice; None if it has been told nothing at all."""
        wanted = [how.get(name) for name in ("kind", "island", "topology")]
        more = {name: how[name] for name in ("apart", "waits", "exclusive") if name in how}
        self.say(CONTROL, msg.AllocateSlice(number, devices, *wanted, **more))
        return next(iter(self.world.to(CONTROL)[-1:]), None)

    def told(self, node: str, kind: type) -> list[Any]:
        return self.world.to(executor_of(node), kind)

    def news(self, kind: type) -> list[Any]:
        return self.world.to(CONTROL, kind)


def test_an_island_is_formed_when_all_its_hosts_have_come() -> None:
    bench = Bench()
    bench.host("y", hosts=2)
    assert not bench.told("y", msg.FormIsland)
    bench.host("x", hosts=2)
    (form,) = bench.told("x", msg.FormIsland)
    assert (form.epoch, form.hosts, form.rank, form.tickets) == (1, ("x", "y"), 0, TICKETS.public)
    assert bench.told("y", msg.FormIsland)[0].rank == 1
    bench.joined("y")
    assert not bench.news(msg.IslandFormed)
    bench.joined("x")
    assert bench.news(msg.IslandFormed) == [msg.IslandFormed("i", 1, ("x", "y"), None, True, 2)]
    assert {peer.node for peer in bench.news(msg.Directory)[-1].peers} == {"x", "y"}
    bench.joined("x")
    assert len(bench.news(msg.IslandFormed)) == 1, "a second answer forms nothing"


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ({"hosts": 3}, "IslandFull", "--island-hosts 2"),
        ({"hosts": 2, "devices": 4}, "PlacementError", "this worker has 4 cpu devices"),
        ({"hosts": 2, "platform": "cuda"}, "PlacementError", "this worker has 1 cuda devices"),
    ],
)
def test_a_host_that_does_not_fit_is_told_why(how: Any, kind: str, words: str) -> None:
    bench = Bench()
    bench.host("x", hosts=2)
    bench.host("odd", **how)
    (rejected,) = bench.told("odd", msg.HostRejected)
    assert rejected.error.kind == kind
    assert words in rejected.error.message
    bench.host("y", hosts=2)
    assert bench.told("y", msg.FormIsland), "the others do not suffer from it"


def test_slices_that_lie_apart_are_on_different_islands() -> None:
    bench = Bench()
    bench.island("a", 1, 8)
    bench.island("b", 1, 2)
    first = bench.ask(1, 2)
    second = bench.ask(2, 2, apart=(1,))
    assert {first.island, second.island} == {"a", "b"}
    refused = bench.ask(3, 2, apart=(1, 2))
    assert isinstance(refused, msg.SliceRefused)
    assert "no island besides the 2 islands of the other slices has" in refused.error.message
    assert bench.ask(4, 2, apart=(1,)).island == second.island


def test_a_full_island_takes_no_host() -> None:
    bench = Bench()
    bench.island("i", 2, 1)
    bench.host("late", hosts=2)
    (rejected,) = bench.told("late", msg.HostRejected)
    assert "i0, i1" in rejected.error.message
    assert not bench.news(msg.EpochEnded)


def test_a_host_that_comes_while_a_seat_is_kept_gets_it_if_it_stays_free() -> None:
    """Not as a spare: a worker that a user starts in the place of one that has died."""
    bench = Bench()
    bench.island("i", 1, 1)
    bench.say(RESOURCES, msg.PeerLost("i0", "closed"))
    bench.host("new")
    assert not bench.told("new", msg.HostRejected)
    assert not bench.told("new", msg.FormIsland), "the other may be back in a moment"
    bench.world.wait(RESTART_S)
    assert bench.told("new", msg.FormIsland)


def test_a_lost_host_ends_the_epoch_for_all_and_the_next_has_a_higher_number() -> None:
    bench = Bench()
    bench.island("i", 2, 1)
    for epoch in (1, 2, 3):
        bench.lose("i0")
        assert bench.told("i1", msg.LeaveIsland)[-1].epoch == epoch
        assert not bench.told("i0", msg.LeaveIsland)
        assert bench.news(msg.EpochEnded)[-1].error.kind == "HostLost"
        assert bench.news(msg.Directory)[-1].peers == ()
        assert bench.world.to(SERVICES, msg.StopCoordination)[-1].epoch == epoch
        bench.lose("i1")
        bench.island("i", 2, 1, epoch + 1)
        assert bench.news(msg.IslandFormed)[-1].epoch == epoch + 1
    assert len(bench.news(msg.EpochEnded)) == 3


def test_a_host_that_waits_for_others_hears_that_it_has_its_seat() -> None:
    bench = Bench()
    bench.island("i", 2, 1)
    for node in ("i0", "i1"):
        bench.lose(node)
    before = len(bench.told("i0", msg.HostRegistered)), len(bench.told("i0", msg.Directory))
    bench.host("i0", hosts=2)
    after = len(bench.told("i0", msg.HostRegistered)), len(bench.told("i0", msg.Directory))
    assert after == (before[0] + 1, before[1]), "it hears of all hosts with the others"


@pytest.mark.parametrize("count", [8, 64])
def test_what_a_host_costs_until_its_island_is_ready_does_not_grow_with_the_hosts(
    count: int,
) -> None:
    bench = Bench()
    bench.island("i", count, 1)
    told = [m for sender, to, m in bench.world.sent if to.node.startswith("i")]
    kinds = Counter(type(message) for message in told)
    assert kinds == {msg.HostRegistered: count, msg.FormIsland: count, msg.Directory: count}
    directories = {id(message) for message in told if isinstance(message, msg.Directory)}
    assert len(directories) == 1, "it is encoded once for all"


def test_what_comes_from_an_old_epoch_changes_nothing() -> None:
    bench = Bench()
    bench.host("x", hosts=2)
    bench.host("y", hosts=2)
    bench.lose("x")
    bench.host("y", hosts=2)
    bench.joined("y", epoch=1)
    assert not bench.news(msg.IslandFormed), "one host of two, with an answer from before"
    bench.host("x", hosts=2)
    bench.joined("x", epoch=1)
    bench.say(executor_of("y"), msg.IslandJoinFailed("i", 1, ErrorReport("Error", "late")))
    bench.joined("x", epoch=2)
    bench.joined("y", epoch=2)
    assert [formed.epoch for formed in bench.news(msg.IslandFormed)] == [2]
    bench.say(Address("controller", "scheduler/i"), msg.EndEpoch("i", 1, "old"))
    assert not bench.news(msg.EpochEnded)
    bench.say(Address("controller", "scheduler/i"), msg.EndEpoch("i", 2, "a gap"))
    assert len(bench.news(msg.EpochEnded)) == 1
    assert all(bench.told(node, msg.LeaveIsland)[-1].reason == "a gap" for node in ("x", "y"))


def test_a_host_that_joins_an_epoch_that_lost_it_is_told() -> None:
    """It was cut off, and has not noticed: it would wait for ever."""
    bench = Bench()
    bench.host("x")
    bench.lose("x")
    bench.joined("x")
    assert [left.epoch for left in bench.told("x", msg.LeaveIsland)] == [1]


def test_a_host_that_comes_again_begins_a_new_epoch_and_may_have_changed() -> None:
    bench = Bench()
    bench.island("i", 1, 1)
    bench.host("i0", devices=8)
    assert not bench.told("i0", msg.HostRejected)
    bench.joined("i0", epoch=2, devices=8)
    assert [formed.epoch for formed in bench.news(msg.IslandFormed)] == [1, 2]
    assert len(bench.news(msg.EpochEnded)) == 1


def test_a_host_that_has_not_what_it_announced_ends_the_epoch() -> None:
    bench = Bench()
    bench.host("x", devices=4)
    bench.joined("x", devices=2)
    assert not bench.news(msg.IslandFormed)
    bench.host("x", devices=2)
    bench.joined("x", epoch=2, devices=2)
    assert bench.news(msg.IslandFormed)


def test_slices_are_spread_over_islands_and_devices() -> None:
    bench = Bench()
    bench.island("a", 2, 2)
    bench.island("b", 1, 4)
    load: Counter[Any] = Counter()
    for number in range(1, 9):
        bound = bench.ask(number, 2)
        assert len(set(bound.devices)) == 2
        load.update(bound.devices)
    assert set(load.values()) == {2}
    assert len(load) == 8
    for number in (1, 2, 3):
        bench.say(CONTROL, msg.ReleaseSlice(number))
    freed = Counter(d for m in bench.news(msg.SliceBound)[:3] for d in m.devices)
    again = Counter(d for n in (11, 12, 13) for d in bench.ask(n, 2).devices)
    assert freed == again, "released devices are the least loaded"


def test_three_slices_of_two_on_two_devices() -> None:
    bench = Bench()
    bench.island("a", 1, 2)
    bound = [bench.ask(number, 2) for number in (1, 2, 3)]
    assert all(one.devices == bound[0].devices for one in bound)
    assert len(set(bound[0].devices)) == 2


def test_a_topology_is_a_block_of_hosts_and_devices() -> None:
    bench = Bench()
    bench.island("a", 4, 4)
    first = bench.ask(1, 4, topology=(2, 2)).devices
    hosts = sorted({device.host for device in first})
    ordinals = sorted({device.ordinal for device in first})
    assert len(set(first)) == 4
    assert (len(hosts), len(ordinals)) == (2, 2)
    assert ordinals[1] == ordinals[0] + 1
    assert not set(first) & set(bench.ask(2, 8, topology=(2, 4)).devices), "the least loaded block"
    for number, (devices, topology) in enumerate(
        [(5, (2, 2)), (10, (5, 2)), (5, (1, 5)), (4, (-2, -2)), (0, ())], 10
    ):
        assert isinstance(bench.ask(number, devices, topology=topology), msg.SliceRefused)


def test_a_refusal_names_what_was_asked_and_what_there_is() -> None:
    bench = Bench(expected_islands=0)
    refused = bench.ask(1, 3)
    assert "3 devices" in refused.error.message
    assert refused.error.message.endswith("There are: no islands yet")
    bench.island("a", 1, 2)
    bench.host("b0", "b", hosts=2)
    refused = bench.ask(2, 3, kind="TPU", island="a")
    assert refused.error.kind == "InsufficientDevices"
    for words in ("3 devices", "kind='TPU'", "island='a'", "a (cpu, 2 devices on 1 host)"):
        assert words in refused.error.message
    assert "b (cpu, 2 devices on 2 hosts, waiting: 1 of 2 hosts are here)" in refused.error.message


def test_slices_are_bound_again_when_their_island_is_back() -> None:
    bench = Bench()
    bench.island("a", 1, 4)
    numbers = (1, 2, 3)
    for number in numbers:
        bench.ask(number, 2)
    bench.lose("a0")
    bench.say(CONTROL, msg.ReleaseSlice(2))
    bench.island("a", 1, 4, epoch=2)
    before, after = bench.news(msg.SliceBound)[:3], bench.news(msg.SliceBound)[3:]
    there = [(bound.slice, bound.devices) for bound in (before[0], before[2])]
    assert [(bound.slice, bound.devices) for bound in after] == there, "for what lies there"
    assert {bound.epoch for bound in after} == {2}


def test_a_host_that_was_replaced_from_elsewhere_can_go_anywhere() -> None:
    """Also if that host was itself replaced by one from elsewhere, which has gone."""
    bench = Bench()
    bench.island("a", 1, 1)
    bench.island("b", 1, 1)
    islands = bench.manager.inventory.islands
    bench.host("s", "", 0, spare=True)
    bench.lose("a0")
    assert islands["a"].ranks == ["s"]
    bench.host("a0", "a", spare=True)
    bench.lose("b0")
    assert islands["b"].ranks == ["a0"]
    bench.host("b0", "b", spare=True)
    bench.lose("s")
    assert islands["a"].ranks == ["b0"]


def test_an_island_of_an_earlier_controller_is_completed_by_spares() -> None:
    """None of its hosts was in an epoch when that was lost, and one of them has gone for good."""
    bench = Bench()
    bench.host("a0", "a", 2)
    bench.host("s", "", 0, spare=True)
    island = bench.manager.inventory.islands["a"]
    request = msg.AllocateSlice(1, 2, None, "a", None, resumed=True, formerly="a")
    bench.say(CONTROL, request)
    bench.world.wait(29)
    assert island.state == "waiting"
    bench.world.wait(2)
    bench.joined("a0", island="a")
    bench.joined("s", island="a")
    assert [bound.slice for bound in bench.news(msg.SliceBound)] == [1]


@pytest.mark.parametrize("late", [0, 1])
def test_an_island_whose_hosts_sit_elsewhere_is_known_again_after_a_restart(late: int) -> None:
    """No host names it as its place but one that has another: spares make it whole, if they can."""
    bench = Bench()
    recalled = msg.RegisterHost("a", 1, 1, "cpu", "at b0", 7, True, 3, ("b0",))
    bench.say(executor_of("b0"), recalled)
    spares = ["s", "t"]
    for spare in spares[late:]:
        bench.host(spare, "", 0, spare=True)
    bench.host("b0", "b", 2, spare=True)
    islands = bench.manager.inventory.islands
    assert set(islands["a"].hosts) == {"b0"}
    assert not islands["b"].hosts, "its own hosts may be about to come"
    bench.world.wait(REJOIN_S + 1)
    for spare in spares[:late]:
        assert not islands["b"].hosts, "one is not enough, and may be needed elsewhere"
        bench.host(spare, "", 0, spare=True)
    assert islands["b"].state == "forming"
    assert islands["b"].ranks == spares


def test_a_host_that_returns_to_a_seat_elsewhere_leaves_its_own_island_alone() -> None:
    """Its own has another form, and the one where it was has no other hosts."""
    bench = Bench()
    bench.island("a", 2, 1)
    bench.island("b", 1, 1)
    islands = bench.manager.inventory.islands
    bench.host("s", "", 0, spare=True)
    bench.lose("a0")
    assert islands["a"].ranks == ["s", "a1"]
    bench.host("a0", "a", 2, spare=True)
    bench.lose("b0")
    assert islands["b"].ranks == ["a0"]
    own = islands["a"]
    bench.lose("a0")
    bench.host("a0", "a", 2, spare=True)
    assert islands["a"] is own
    assert set(islands["b"].hosts) == {"a0"}


def test_a_slice_of_an_island_that_is_away_waits_for_so_long_whenever_it_is_asked_for() -> None:
    bench = Bench()
    bench.island("a", 2, 1)
    bench.island("b", 1, 1)
    bench.lose("a0")
    for number in (1, 2):
        bench.world.wait(29)
        bench.ask(number, 2)
    bench.world.wait(2)
    assert [refused.slice for refused in bench.news(msg.SliceRefused)] == [1]
    bench.world.wait(29)
    assert [refused.slice for refused in bench.news(msg.SliceRefused)] == [1, 2]


def test_requests_wait_for_the_islands_of_a_cluster_that_starts() -> None:
    bench = Bench(expected_islands=2)
    bench.ask(1, 2)
    bench.ask(2, 1, kind="kind")
    bench.ask(3, 9)
    bench.world.wait(CLUSTER_START_S / 2)
    bench.island("a", 1, 1)
    assert [bound.slice for bound in bench.news(msg.SliceBound)] == [2]
    bench.ask(4, 1, apart=(2,))
    assert not bench.news(msg.SliceRefused), "the other island may have what the first one has not"
    bench.host("b0", "b", hosts=2)
    bench.host("b1", "b", hosts=2)
    assert bench.manager.inventory.awaited_islands == 0
    bench.joined("b0", island="b")
    bench.joined("b1", island="b")
    assert [bound.slice for bound in bench.news(msg.SliceBound)] == [2, 1, 4]
    assert [refused.slice for refused in bench.news(msg.SliceRefused)] == [3]
    bench.ask(5, 9)
    assert bench.news(msg.SliceRefused)[-1].slice == 5, "the cluster has started"


def test_a_request_waits_no_longer_than_a_cluster_may_take_to_start() -> None:
    bench = Bench()
    bench.host("s", "", spare=True)
    bench.ask(1, 2)
    bench.world.wait(CLUSTER_START_S - 1)
    assert not bench.news(msg.SliceRefused)
    bench.world.wait(2)
    (refused,) = bench.news(msg.SliceRefused)
    for words in ("no islands yet. Hosts without an island: s (spare)", "for 1 island: start the"):
        assert words in refused.error.message


def test_an_island_that_lacks_hosts_is_waited_for() -> None:
    bench = Bench()
    bench.island("a", 1, 1)
    bench.host("b0", "b", hosts=2)
    bench.ask(1, 2, island="b", kind="kind")
    bench.ask(2, 3, island="b")
    assert [refused.slice for refused in bench.news(msg.SliceRefused)] == [2], "it has two devices"
    bench.host("b1", "b", hosts=2)
    bench.joined("b0", island="b")
    bench.joined("b1", island="b")
    assert [bound.slice for bound in bench.news(msg.SliceBound)] == [1]
    bench.host("c0", "c", hosts=2)
    bench.ask(3, 2, island="c")
    bench.world.wait(MOVE_S + 1)
    assert bench.news(msg.SliceRefused)[-1].slice == 3


def test_slices_of_a_late_island_go_where_there_is_room_as_soon_as_there_is() -> None:
    bench = Bench()
    bench.island("a", 1, 1)
    bench.ask(1, 1)
    bench.island("b", 1, 1)
    bench.lose("b0")
    bench.lose("a0")

    def late() -> list[str]:
        return [island.name for island in bench.manager.status({}) if island.is_late]

    assert late() == []
    bench.world.wait(MOVE_S + 10)
    assert late() == ["a", "b"]
    assert [bound.island for bound in bench.news(msg.SliceBound)] == ["a"]
    bench.island("b", 1, 1, epoch=2)
    assert late() == ["a"]
    assert [bound.island for bound in bench.news(msg.SliceBound)] == ["a", "b"]
    bench.island("a", 1, 1, epoch=2)
    assert len(bench.news(msg.SliceBound)) == 2
    bench.lose("a0")
    bench.lose("b0")
    bench.island("a", 1, 1, epoch=3)
    assert len(bench.news(msg.SliceBound)) == 2, "its own island has as long again to come back"


def test_a_slice_that_does_not_fit_any_more_is_refused_not_shrunk() -> None:
    bench = Bench()
    bench.island("a", 1, 4)
    bench.ask(1, 4)
    bench.ask(2, 2)
    bench.lose("a0")
    bench.island("a", 1, 2, epoch=2)
    assert [bound.slice for bound in bench.news(msg.SliceBound)[2:]] == [2]
    (refused,) = bench.news(msg.SliceRefused)
    assert refused.slice == 1
    bench.say(CONTROL, msg.ReleaseSlice(1))
    bench.say(CONTROL, msg.ReleaseSlice(2))
    assert len(bench.ask(3, 2).devices) == 2


def drained(bench: Bench) -> list[ErrorReport | None]:
    return [answer.error for answer in bench.world.to(session_of("c"), msg.Answered)]


def test_islands_that_have_waited_for_a_drained_host_are_formed_when_it_is_given_up() -> None:
    """Also one that has never had an epoch, and so no timer."""
    bench = Bench()
    bench.island("a", 2, 1)
    bench.host("s", "a", 2, spare=True)
    bench.host("b0", "b", 2)
    bench.say(CONTROL, msg.DrainHost(1, "a0", "c"))
    bench.host("a1", "a", 2)
    bench.host("b1", "b", 2)
    islands = bench.manager.inventory.islands
    assert {island.state for island in islands.values()} == {"waiting"}
    bench.world.wait(REJOIN_S + 1)
    (error,) = drained(bench)
    assert error is not None
    assert "did not come back" in error.message
    assert {island.state for island in islands.values()} == {"forming"}


def test_a_drained_host_has_its_time_though_that_of_another_island_ends() -> None:
    bench = Bench()
    bench.island("a", 2, 1)
    bench.island("b", 2, 1)
    bench.host("s", "a", 2, spare=True)
    bench.lose("b0")
    bench.world.wait(REJOIN_S - 5)
    bench.say(CONTROL, msg.DrainHost(1, "a0", "c"))
    bench.world.wait(6)
    bench.host("a0", "a", 2)
    assert bench.news(msg.Draining)[-1].nodes == ("a0",)
    assert not drained(bench)


def islands_for_one_slice() -> Bench:
    """Two islands of two hosts; the first has a slice, for which the second has room."""
    bench = Bench()
    bench.island("a", 2, 1)
    bench.ask(1, 2)
    bench.island("b", 2, 1)
    return bench


def test_slices_move_when_the_hosts_are_back_with_what_they_held() -> None:
    """Before, all that lay there would be made again."""
    bench = islands_for_one_slice()
    bench.say(CONTROL, msg.DrainHost(1, "a0", "c"))
    for node in ("a1", "a0"):
        assert len(bench.news(msg.SliceBound)) == 1
        bench.host(node, "a", 2)
    assert [bound.island for bound in bench.news(msg.SliceBound)] == ["a", "b"]


def test_slices_move_though_a_host_ends_on_its_way_back() -> None:
    bench = islands_for_one_slice()
    bench.say(CONTROL, msg.DrainHost(1, "a0", "c"))
    bench.host("a1", "a", 2)
    bench.world.wait(REJOIN_S + 1)
    assert [bound.island for bound in bench.news(msg.SliceBound)] == ["a", "b"]


def test_slices_of_an_island_between_epochs_move_when_its_last_host_is_drained() -> None:
    bench = islands_for_one_slice()
    bench.lose("a1")
    bench.host("a0", "a", 2)
    assert [bound.island for bound in bench.news(msg.SliceBound)] == ["a"]
    bench.say(CONTROL, msg.DrainHost(1, "a0", "c"))
    assert [bound.island for bound in bench.news(msg.SliceBound)] == ["a", "b"]


def leaving() -> Bench:
    """An island of two hosts, of which a0 asks to leave, and a spare for it."""
    bench = Bench()
    bench.island("a", 2, 1)
    bench.host("s", "a", 2, spare=True)
    bench.say(executor_of("a0"), msg.AskToLeave())
    return bench


def test_a_host_that_asks_to_leave_is_drained_or_ends_at_once() -> None:
    bench = leaving()
    bench.say(executor_of("a0"), msg.AskToLeave())
    assert bench.manager.inventory.draining == {"a0": None}
    assert not bench.world.to(executor_of("a0"), msg.Leave)
    bench.host("a0", "a", 2, is_to_end=True)
    bench.say(CONTROL, msg.HostEmptied("a0"))
    assert [one.reason for one in bench.world.to(executor_of("a0"), msg.Leave)] == [
        "it was drained"
    ]
    bench.say(executor_of("x0"), msg.AskToLeave())
    (leave,) = bench.world.to(executor_of("x0"), msg.Leave)
    assert "it has no place" in leave.reason
    assert leave.keeps


def must_end() -> Bench:
    """An island of one host with a slice, which no other host can take; the host is told to end."""
    bench = Bench()
    bench.island("a", 1, 1)
    bench.ask(1, 1)
    bench.say(executor_of("a0"), msg.AskToLeave())
    assert bench.news(msg.HostMustEnd) == [msg.HostMustEnd("a0", "a")]
    assert not bench.manager.inventory.draining
    return bench


def test_a_host_that_must_end_waits_until_its_clients_have_left() -> None:
    bench = must_end()
    bench.say(CONTROL, msg.ClientsLeft("a0"))
    assert bench.manager.inventory.draining == {"a0": None}
    bench.lose("a0")  # its process, which begins again
    assert not bench.news(msg.HostEnded)
    bench.host("a0", "a", is_to_end=True)
    bench.say(CONTROL, msg.HostEmptied("a0", keeps=True))
    assert [one.keeps for one in bench.told("a0", msg.Leave)] == [True]
    assert bench.news(msg.HostEnded) == [msg.HostEnded("a0")]
    bench.host("a0", "a")
    assert len(bench.told("a0", msg.FormIsland)) == 2


def test_a_host_that_is_lost_before_its_clients_have_left_has_ended() -> None:
    bench = must_end()
    bench.lose("a0")
    assert bench.news(msg.HostEnded) == [msg.HostEnded("a0")]
    bench.say(CONTROL, msg.ClientsLeft("a0"))
    assert not bench.manager.inventory.draining


def test_a_worker_is_not_taken_for_one_that_was_told_to_end_before_it() -> None:
    """That one was killed before it came back to be emptied."""
    bench = must_end()
    bench.say(CONTROL, msg.ClientsLeft("a0"))
    bench.lose("a0")
    bench.host("a0", "a")
    assert bench.news(msg.HostEnded) == [msg.HostEnded("a0")]
    assert not bench.manager.inventory.draining
    assert len(bench.told("a0", msg.FormIsland)) == 2


def test_a_host_that_begins_again_to_be_emptied_gets_no_seat() -> None:
    """Another host of its island was drained first, so its own epoch has ended too."""
    bench = leaving()
    bench.say(executor_of("a1"), msg.AskToLeave())
    assert not bench.told("a1", msg.Leave), "its next incarnation says the same"
    bench.host("a1", "a", 2, is_to_end=True)
    assert bench.manager.inventory.draining.keys() == {"a0", "a1"}
    bench.host("t", "a", 2, spare=True)
    bench.host("a0", "a", 2, is_to_end=True)
    assert bench.told("t", msg.FormIsland), "the seat is free"


def test_a_host_that_is_to_end_and_is_rejected_stops_no_island() -> None:
    bench = Bench()
    bench.world.islands = {"x0": ("east",)}
    bench.host("x0", "a", is_to_end=True)
    assert bench.told("x0", msg.HostRejected)
    bench.host("a0", "a")
    assert bench.told("a0", msg.FormIsland)


def test_a_slice_that_waits_however_long_outlives_the_timers_of_earlier_requests() -> None:
    """A client that was suspended asks for its slice again."""
    bench = Bench()
    bench.ask(1, 1)  # it waits for the cluster to start
    bench.island("a", 1, 1)
    bench.say(CONTROL, msg.ReleaseSlice(1))
    bench.lose("a0")
    bench.ask(1, 1, waits=True)
    bench.world.wait(2 * CLUSTER_START_S)
    assert not bench.news(msg.SliceRefused)


def again(bench: Bench, client: int, *had: tuple[int, int]) -> None:
    """Two exclusive slices of a client are asked for in one turn, as when it goes on."""
    for index, place in enumerate(had or ((), ())):
        wanted = msg.AllocateSlice(
            client_id(client, index + 1),
            2,
            None,
            None,
            None,
            exclusive=True,
            waits=True,
            together=True,
            former_devices=tuple([DeviceAddress("a0", ordinal) for ordinal in place]),
        )
        bench.world.mailboxes["controller"].append((CONTROL, RESOURCES, wanted))
    bench.world.drain("controller")


def places(bench: Bench) -> dict[int, tuple[int, ...]]:
    """Devices of each slice, in the order in which slices were bound."""
    bound = bench.news(msg.SliceBound)
    return {one.slice: tuple(at.ordinal for at in one.devices) for one in bound}


def test_clients_that_go_on_do_not_wait_for_each_others_slices() -> None:
    """Each has all of its exclusive slices, or none."""
    bench = Bench()
    bench.island("a", 1, 5)
    for number in (1, 2, 3, 4):
        bench.ask(number, 1, exclusive=True)
    again(bench, 1)
    again(bench, 2)
    assert not places(bench).keys() - {1, 2, 3, 4}
    bench.say(CONTROL, msg.ReleaseSlice(1))
    bench.say(CONTROL, msg.ReleaseSlice(2))
    assert not places(bench).keys() - {1, 2, 3, 4}, "there is room for one of two slices"
    bench.say(CONTROL, msg.ReleaseSlice(3))
    first, second = client_id(1, 1), client_id(1, 2)
    assert places(bench).keys() - {1, 2, 3, 4} == {first, second}
    bench.say(CONTROL, msg.ReleaseSlice(first))
    assert len(places(bench)) == 6
    bench.say(CONTROL, msg.ReleaseSlice(second))
    assert len(places(bench)) == 8


def test_a_client_that_goes_on_has_its_former_devices_if_they_are_free() -> None:
    bench = Bench()
    bench.island("a", 1, 6)
    again(bench, 1, (5, 1), (4, 2))
    assert places(bench) == {client_id(1, 1): (5, 1), client_id(1, 2): (4, 2)}
    again(bench, 2, (0, 1), (2, 3))
    assert len(places(bench)) == 2
    bench.say(CONTROL, msg.ReleaseSlice(client_id(1, 1)))
    assert places(bench)[client_id(2, 1)] == (0, 1), "not those of 1, which are not all free"


def test_a_client_that_is_alone_takes_what_there_is() -> None:
    bench = Bench()
    bench.island("a", 1, 3)
    again(bench, 1)
    assert places(bench).keys() == {client_id(1, 1)}


def test_a_host_joins_only_islands_that_its_certificate_allows() -> None:
    bench = Bench()
    bench.world.islands = {"w0": ("east",), "w1/0": ("west", "east")}
    for node in ("w0", "w1/0"):
        bench.host(node, "north")
        bench.host(node, "north", 0, spare=True)
        refused = bench.world.to(executor_of(node), msg.HostRejected)
        assert [one.error.kind for one in refused] == ["AccessRefused"] * 2
        assert "does not allow the island 'north'" in refused[0].error.message
    assert "north" not in bench.manager.inventory.islands
    bench.host("w1/0", "west")
    (formed,) = bench.world.to(executor_of("w1/0"), msg.FormIsland)
    assert formed.island == "west"


def test_a_spare_takes_no_seat_that_its_certificate_does_not_allow() -> None:
    bench = Bench()
    bench.world.islands = {"s": ("east",)}
    bench.island("west", 1, 1)
    bench.host("s", "", 0, spare=True)
    bench.lose("west0")
    bench.world.wait(RESTART_S + REJOIN_S)
    assert not bench.world.to(executor_of("s"), msg.FormIsland)
    bench.host("t", "", 0, spare=True)
    assert bench.world.to(executor_of("t"), msg.FormIsland)


def test_a_host_whose_certificate_was_narrowed_does_not_get_its_former_seat() -> None:
    bench = Bench()
    bench.island("west", 1, 1)
    bench.lose("west0")
    bench.world.islands = {"west0": ("east",)}
    bench.host("west0", "east")
    assert bench.world.to(executor_of("west0"), msg.FormIsland)[-1].island == "east"
