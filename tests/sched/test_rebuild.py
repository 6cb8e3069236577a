"""What clients had on lost hosts comes back: from copies, by running again, or with a reason why not."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest

from pw.core import messages as msg
from pw.core.errors import INFRASTRUCTURE, ErrorReport, HostLost
from pw.core.ids import CONTROL, CONTROLLER, RESOURCES, Address, scheduler_of, session_of, store_of
from pw.core.packing import pack
from pw.core.programs.program import Node, Output, ValueRef
from pw.core.sharding import ArraySpec, box_slices, host_boxes
from pw.devices.host.replica_memory import KEEP_S
from pw.sched.control.lineage import AGAIN_S, DOUBLINGS
from tests.stages.actors import World
from tests.stages.samples import diagonal, some
from tests.stages.scripted import LARGE, SMALL, Client, chain, copy, split
from tests.stages.supervised import SupervisedHost

X = np.arange(SMALL)


class Survivor(Client):
    """A client that asks again when a host cannot say what became of an array."""

    keeps_inputs = True

    def receive(self, sender: Any, message: Any) -> None:
        super().receive(sender, message)
        if isinstance(message, msg.PeerLost):
            self.known.discard(message.node)
        elif isinstance(message, msg.UploadAgain):
            if self.keeps_inputs:
                value, spec = self.uploads[message.array], self.specs[message.array]
                self.uploads[message.name], self.specs[message.name] = value, spec
                self.send_again(message.name, value, spec)
            else:
                self.tell(msg.InputGone(message.name))

    def send_again(self, array: int, value: Any, spec: ArraySpec) -> None:
        devices = self.devices(spec)
        for host in dict.fromkeys(device.host for device in devices):
            boxes = host_boxes(spec, devices, host)
            data = pack([value[box_slices(box)] for box, _ in boxes])
            self.tell_host(host, msg.Upload(array, spec, devices, data, *self.place(spec)))

    def announce(self, value: Any, spec: ArraySpec) -> int:
        """An upload while the slice is not bound: the bytes follow when they are asked for."""
        array = self.id()
        self.specs[array], self.uploads[array] = spec, value
        self.tell(msg.CreateArray(array, spec, 0))
        return array

    def checkpoint(self, *arrays: int) -> int:
        number = self.id()
        self.tell(msg.Checkpoint(number, arrays))
        return number

    def answered(self, request: int) -> msg.Answered | None:
        return next((m for m in self.of(msg.Answered) if m.request == request), None)

    def why(self) -> str:
        """The verdict of `pw why`."""
        return self.explanation().text.splitlines()[0]

    def explanation(self) -> msg.Explanation:
        """All of `pw why`."""
        number = self.id()
        self.tell(msg.Explain(number))
        self.env.world.settle()
        self.env.world.wait(1)
        (answer,) = [m for m in self.of(msg.Explanation) if m.request == number]
        return answer

    def value(self, array: int) -> Any:
        for _ in range(20):
            if array in self.failed:
                return self.failed[array]
            number = self.id()
            self.tell(msg.Inquire(number, (array,)))
            self.env.world.settle()
            if array in self.failed:
                return self.failed[array]
            assert self.answered(number) is not None, "an inquiry hangs"
            losses = len(self.of(msg.PeerLost))
            asked = self.fetch(array)
            self.env.world.settle()
            answer = self.answer(array, asked)
            if answer is None and len(self.of(msg.PeerLost)) > losses:
                continue  # it was asked of a process that had ended
            assert answer is not None, "a fetch hangs"
            if not isinstance(answer, ErrorReport):
                return answer
            if answer.kind not in INFRASTRUCTURE | {"ArrayDeleted"}:
                return answer
            self.env.world.wait(0.5)
        raise AssertionError(f"it never comes back: {answer}")


class Cluster:
    """Island a of two hosts, island b of one, a client with a slice on each."""

    def __init__(self, seed: int = 0, spares: int = 0, elements: int = SMALL) -> None:
        self.world = World(seed)
        self.world.controller()
        self.hosts = {
            name: SupervisedHost(self.world, name, name[0], hosts)
            for name, hosts in (("a0", 2), ("a1", 2), ("b0", 1))
        }
        for index in range(spares):
            name = f"s{index}"
            self.hosts[name] = SupervisedHost(self.world, name, "", spare=True)
        self.world.settle()
        self.client: Survivor = self.world.add(session_of("c"), Survivor)
        self.world.settle()
        a, b = self.client.slice(2, "a"), self.client.slice(1, "b")
        self.world.settle()
        self.a, self.b = split(a, 2, elements), split(b, 1, elements)
        self.elements = elements
        self.x = np.arange(elements)

    def idle(self) -> None:
        """Nothing of the client is left anywhere once it has let go of everything."""
        self.world.settle()
        self.world.wait(40)
        self.world.wait(1300)
        for host in self.hosts.values():
            if not host.finished:
                left = host.current.census()
                assert not any(left.values()), f"{host.name}: {left}"
        for client in self.world.control.sessions.clients:
            assert not self.world.control.checkpoints.count(client)
            assert not self.world.control.saves.count(client)


def crash_points() -> Any:
    return pytest.mark.parametrize("seed", some(range(40), 8))


@crash_points()
@pytest.mark.parametrize("victim", ["a0", "a1", "b0"])
def test_a_chain_over_two_islands_survives_a_crash_at_any_moment(seed: int, victim: str) -> None:
    cluster = Cluster(seed)
    client, world = cluster.client, cluster.world
    there = client.program(chain([cluster.a, cluster.b]))
    back = client.program(chain([cluster.b, cluster.a]))
    arrays = client.run(there, X)
    for index in range(4):
        arrays += client.run(back if index % 2 == 0 else there, arrays[-1])
    world.steps(seed * 3)
    cluster.hosts[victim].crash()
    for index in range(4, 6):
        arrays += client.run(back if index % 2 == 0 else there, arrays[-1])
    world.settle()
    world.wait(5)
    for index, array in enumerate(arrays):
        np.testing.assert_array_equal(client.value(array), X + 2 * (index + 1))
    assert client.credits == client.sent_runs
    client.delete(*arrays)
    client.release(there), client.release(back)
    cluster.idle()


@crash_points()
@pytest.mark.parametrize("elements", [SMALL, LARGE])
def test_a_donated_step_goes_on_from_its_checkpoint(seed: int, elements: int) -> None:
    cluster = Cluster(seed, elements=elements)
    client, world = cluster.client, cluster.world
    step = client.program(chain([cluster.a], donated=(0,)))
    state = client.upload(cluster.x, cluster.a)
    (state,) = client.run(step, state)
    (state,) = client.run(step, state)
    asked = client.checkpoint(state)
    for _ in range(3):
        (state,) = client.run(step, state)
    world.settle()
    world.wait(KEEP_S)
    assert client.answered(asked) == msg.Answered(asked, None)
    assert len(world.client(client.number).lineage), "back to the checkpoint"
    for _ in range(3):
        (state,) = client.run(step, state)
    world.steps(seed * 2)
    cluster.hosts[f"a{seed % 2}"].crash()
    for _ in range(2):
        (state,) = client.run(step, state)
    world.settle()
    world.wait(5)
    np.testing.assert_array_equal(client.value(state), cluster.x + 10)
    logged = [event for _, event in world.logged if event.startswith("rebuil")]
    assert logged == [*logged[:-1], "rebuilt"] != ["rebuilt"], "what began ends"
    client.delete(state)
    client.release(step)
    cluster.idle()


def test_where_the_network_is_too_slow_a_third_checkpoint_waits_with_all_that_is_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hosts keep the copies of all that are under way, so no more than two may be."""
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    step = client.program(chain([cluster.a], donated=(0,)))
    (state,) = client.run(step, client.upload(cluster.x, cluster.a))
    world.settle()
    under_way: list[Any] = []
    post = world.post

    def slow(sender: Address, to: Address, message: object) -> None:
        if isinstance(message, msg.Holdings) and to == CONTROL:
            under_way.append((sender, to, message))
        else:
            post(sender, to, message)

    monkeypatch.setattr(world, "post", slow)
    asked = []
    for _ in range(5):
        asked.append(client.checkpoint(state))
        (state,) = client.run(step, state)

    def handed_over() -> tuple[int, int]:
        to = scheduler_of("a")
        return len(world.to(to, msg.CopyArrays)), len(world.to(to, msg.Submit)) - 1

    answered = 0
    while answered < 5:
        world.settle()
        world.wait(KEEP_S)
        assert handed_over() == (min(answered + 2, 5),) * 2
        if answered < 3:
            assert "waits for 2 checkpoints that are still being copied" in client.why()
        sent, under_way[:] = list(under_way), []
        assert sent
        for held in sent:
            post(*held)
        world.settle()
        answered = sum(client.answered(one) == msg.Answered(one, None) for one in asked)
    np.testing.assert_array_equal(client.value(state), cluster.x + 6)
    client.delete(state)
    client.release(step)
    monkeypatch.undo()
    cluster.idle()


def test_a_checkpoint_that_is_refused_holds_up_nothing() -> None:
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    asked = [client.checkpoint(client.id()) for _ in range(3)]
    array = client.upload(cluster.x, cluster.a)
    asked.append(client.checkpoint(array))
    world.settle()
    world.wait(KEEP_S)
    kinds = [answer.error and answer.error.kind for answer in map(client.answered, asked) if answer]
    assert kinds == ["ArrayDeleted"] * 3 + [None]
    client.delete(array)
    cluster.idle()


@pytest.mark.parametrize("seed", some(range(20), 8))
@pytest.mark.parametrize("victim", ["a0", "a1", "b0", "drain"])
def test_checkpoints_that_wait_for_others_go_on_whatever_becomes_of_these(
    seed: int, victim: str
) -> None:
    cluster = Cluster(seed, spares=1)
    client, world = cluster.client, cluster.world
    step = client.program(chain([cluster.a], donated=(0,)))
    state = client.upload(cluster.x, cluster.a)
    asked = []
    for _ in range(6):
        (state,) = client.run(step, state)
        asked.append(client.checkpoint(state))
    world.steps(seed * 6)
    if victim == "drain":
        client.tell(msg.DrainHost(client.id(), "a0"))
    else:
        cluster.hosts[victim].crash()
    for _ in range(40):
        world.wait(0.2)
    assert all(map(client.answered, asked)), "a checkpoint is never answered"
    if victim == "drain":
        assert cluster.hosts["a0"].finished == "drained"
    np.testing.assert_array_equal(client.value(state), cluster.x + 6)
    client.delete(state)
    client.release(step)
    cluster.idle()


def test_what_a_checkpoint_was_answered_for_outlives_all_processes() -> None:
    """However soon after the answer they are killed: their supervisors have it."""
    cluster = Cluster(spares=1)
    client, world = cluster.client, cluster.world
    step = client.program(chain([cluster.a], donated=(0,)))
    state = client.upload(cluster.x, cluster.a)
    (state,) = client.run(step, state)
    asked = client.checkpoint(state)
    world.settle()
    if client.answered(asked) is None:
        world.wait(KEEP_S)
    assert client.answered(asked) == msg.Answered(asked, None)
    for name in ("a0", "a1", "b0"):
        cluster.hosts[name].crash()
    world.settle()
    world.wait(5)
    np.testing.assert_array_equal(client.value(state), cluster.x + 1)


def test_copies_that_all_hosts_take_away_and_bring_back_are_kept() -> None:
    """Nothing else is left of an array that was donated away behind them, however often that happens."""
    cluster = Cluster(spares=1)
    client, world = cluster.client, cluster.world
    step = client.program(chain([cluster.a], donated=(0,)))
    state = client.upload(cluster.x, cluster.a)
    (state,) = client.run(step, state)
    client.checkpoint(state)
    world.settle()
    for epoch in range(1, 4):
        for name in ("a0", "a1", "b0"):
            host = cluster.hosts[name]
            host.waits = True
            leave = msg.LeaveIsland(name[0], epoch, "a test")
            world.post(RESOURCES, Address(name, "executor"), leave)
        world.settle()
        for name in ("a0", "a1", "b0"):
            cluster.hosts[name].waits = False
            cluster.hosts[name].start()
        world.settle()
        np.testing.assert_array_equal(client.value(state), cluster.x + 1)
    cluster.hosts["a1"].die()
    world.settle()
    np.testing.assert_array_equal(client.value(state), cluster.x + 1)


@pytest.mark.parametrize("returns", [True, False])
def test_hosts_that_have_the_last_copies_are_waited_for(returns: bool) -> None:
    """Spares have taken their places by then, but no other host has what they had."""
    cluster = Cluster(spares=3)
    client, world = cluster.client, cluster.world
    step = client.program(chain([cluster.a], donated=(0,)))
    (state,) = client.run(step, client.upload(cluster.x, cluster.a))
    asked = client.checkpoint(state)
    world.settle()
    world.wait(KEEP_S)
    assert client.answered(asked) == msg.Answered(asked, None)
    keepers = [host for host in cluster.hosts.values() if host.current.census()["replica_arrays"]]
    for host in keepers:
        world.kill(host.name)
    world.settle()
    world.wait(6)
    assert len(client.of(msg.SliceBound)) > 2, "spares have taken their places"
    assert not client.failed
    if returns:
        for host in keepers:
            host.start()
        world.settle()
        world.wait(1)
        np.testing.assert_array_equal(client.value(state), cluster.x + 1)
        return
    world.wait(60)
    assert "no replicas of it" in client.value(state).message


def error_of(client: Survivor, request: int) -> ErrorReport:
    """How a request that was answered has failed."""
    answer = client.answered(request)
    assert answer is not None
    assert answer.error is not None
    return answer.error


@pytest.mark.parametrize("seed", range(5))
def test_a_checkpoint_says_what_kept_an_array_from_being_copied(seed: int) -> None:
    cluster = Cluster(seed, elements=LARGE)
    client, world = cluster.client, cluster.world
    good = client.upload(cluster.x, cluster.a)
    program = client.program(chain([cluster.a], b"raise"), b"raise")
    (failed,) = client.run(program, good)
    asked = client.checkpoint(good, failed)
    world.settle()
    world.wait(KEEP_S)
    assert error_of(client, asked).kind == "ComputationFailed"
    for host in ("a0", "a1", "b0"):
        cluster.hosts[host].current.bulk.full = True
    other = client.upload(cluster.x[:SMALL], msgspec.structs.replace(cluster.a, shape=(SMALL,)))
    (made,) = client.run(client.program(chain([cluster.a])), good)
    refused, fine = client.checkpoint(made), client.checkpoint(other)
    world.settle()
    world.wait(KEEP_S)
    assert error_of(client, refused).kind == "OutOfHostMemory"
    assert client.answered(fine) == msg.Answered(fine, None)


@pytest.mark.parametrize("victim", ["a0", "a1", "b0", "s0"])
def test_a_checkpoint_that_asks_a_host_that_was_just_lost_does_not_wait_for_it(victim: str) -> None:
    """The controller has heard of the loss, but not yet what it means for the island."""
    cluster = Cluster(spares=1)
    client, world = cluster.client, cluster.world
    arrays = (client.upload(cluster.x, cluster.a), client.upload(cluster.x, cluster.b))
    world.settle()
    cluster.hosts[victim].die()
    news = world.links[victim, CONTROLLER]
    world.mailboxes[CONTROLLER].extend(news)
    news.clear()
    asked = client.id()
    world.mailboxes[CONTROLLER].append((client.env.address, CONTROL, msg.Checkpoint(asked, arrays)))
    world.settle()
    world.wait(KEEP_S)
    answered = client.answered(asked)
    assert answered is not None
    assert answered.error is None or answered.error.kind == "HostLost"


def test_a_spare_takes_the_place_of_a_host_that_is_gone() -> None:
    for seed in range(20):
        cluster = Cluster(seed, spares=1)
        client, world = cluster.client, cluster.world
        program = client.program(chain([cluster.a]))
        (array,) = client.run(program, X)
        if seed % 2:
            client.checkpoint(array)
        world.settle()
        cluster.hosts["a1"].die()
        world.settle()
        (more,) = client.run(program, array)
        np.testing.assert_array_equal(client.value(more), X + 2)
        assert {device.host for device in client.bound[cluster.a.placement.slice].devices} == {
            "a0",
            "s0",
        }


def test_survivors_keep_what_they_have_and_inputs_are_sent_again() -> None:
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    one = ArraySpec(
        X.shape,
        "int64",
        cluster.b.sharding,
        type(cluster.a.placement)(cluster.a.placement.slice, (0,)),
    )
    kept = client.upload(X, one)
    split_ = client.upload(X, cluster.a)
    world.settle()
    cluster.hosts["a1"].crash()
    world.settle()
    np.testing.assert_array_equal(client.value(kept), X)
    np.testing.assert_array_equal(client.value(split_), X)
    again = [message.array for message in client.of(msg.UploadAgain)]
    assert again == [split_], "the other one was handed over"
    client.delete(kept, split_)
    world.settle()
    assert {array for message in client.of(msg.ForgetInputs) for array in message.arrays} == {
        kept,
        split_,
    }
    cluster.idle()


def test_what_is_asked_for_while_an_island_is_away_waits_for_it() -> None:
    for seed in range(20):
        cluster = Cluster(seed)
        client, world = cluster.client, cluster.world
        known = client.program(chain([cluster.a]))
        (before,) = client.run(known, X)
        world.settle()
        cluster.hosts["a0"].die()
        world.settle()
        assert client.explanation().left == (("steps of the recovery are done", 1),)
        unbound = client.program(chain([cluster.a] * 2))
        late = client.announce(X, cluster.a)
        (one,), (two,) = client.run(unbound, X), client.run(known, late)
        client.delete(before)
        world.settle()
        assert not client.failed
        cluster.hosts["a0"].finished = ""
        cluster.hosts["a0"].start()
        world.settle()
        np.testing.assert_array_equal(client.value(one), X + 2)
        np.testing.assert_array_equal(client.value(two), X + 1)
        client.delete(one, two, late)
        client.release(known), client.release(unbound)
        cluster.idle()


def test_what_cannot_be_had_back_says_why() -> None:
    cluster = Cluster()
    cluster.client.keeps_inputs = False
    client, world = cluster.client, cluster.world
    step = client.program(chain([cluster.b], donated=(0,)))
    state = client.upload(X, cluster.b)
    (state,) = client.run(step, state)
    world.settle()
    cluster.hosts["b0"].crash()
    world.settle()
    error = client.value(state)
    assert error.kind == "ArrayLost"
    assert "keep=True" in error.message
    (fine,) = client.run(step, client.upload(X, cluster.b))
    np.testing.assert_array_equal(client.value(fine), X + 1)


def test_an_input_that_is_sent_twice_stays_for_the_runs_that_read_it() -> None:
    """The second time may come when the client has let go of it, and the run has not been launched."""
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    program = client.program(chain([cluster.a]))
    given = client.upload(X, cluster.a)
    world.settle()
    late = client.id()
    client.specs[late] = cluster.a
    client.tell(msg.CreateArray(late, cluster.a, bound=1))
    (first,), (second,) = client.run(program, late), client.run(program, given)
    client.delete(given)
    client.send_again(given, X, cluster.a)
    world.settle()
    client.send_again(late, X + 5, cluster.a)
    np.testing.assert_array_equal(client.value(first), X + 6)
    np.testing.assert_array_equal(client.value(second), X + 1)
    client.delete(late, first, second)
    client.release(program)
    cluster.idle()


def test_what_is_made_of_an_input_that_some_hosts_lack_for_good_fails() -> None:
    """It is not made from what the other hosts have got."""
    cluster = Cluster()
    cluster.client.keeps_inputs = False
    client, world = cluster.client, cluster.world
    program = client.program(chain([cluster.a, cluster.b]))
    given = client.id()
    client.specs[given] = cluster.a
    client.tell(msg.CreateArray(given, cluster.a, bound=1))
    (made,) = client.run(program, given)
    world.settle()
    data = pack([X[: SMALL // 2]])
    devices, place = client.devices(cluster.a), client.place(cluster.a)
    client.tell_host("a0", msg.Upload(given, cluster.a, devices, data, *place))
    world.settle()
    cluster.hosts["b0"].waits = True
    world.post(RESOURCES, Address("b0", "executor"), msg.LeaveIsland("b", 1, "a test"))
    world.settle()
    client.tell(msg.InputGone(given))
    world.settle()
    cluster.hosts["b0"].start()
    world.settle()
    assert client.failed[given].kind == "ArrayLost"
    assert "keep=True" in client.failed[made].message, "nothing was launched"
    assert cluster.hosts["a0"].incarnations == 1


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("returns", [True, False])
def test_a_run_waits_no_more_for_an_upload_that_went_with_another_island(
    held: bool, returns: bool
) -> None:
    """It takes an argument there that it does not read, so the loss of that island is not its own."""
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    reads_second = msgspec.structs.replace(
        chain([cluster.a]), nodes=(Node(0, (ValueRef(-1, 1),)),), inputs=(cluster.b, cluster.a)
    )
    program = client.program(reads_second)
    world.settle()
    unread = client.id()
    client.specs[unread], client.uploads[unread] = cluster.b, X
    client.tell(msg.CreateArray(unread, cluster.b, bound=1))
    (made,) = client.run(program, unread, X)
    if not held:
        client.delete(unread)
    world.settle()
    cluster.hosts["b0"].die()
    world.settle()
    if returns:
        cluster.hosts["b0"].start()
        world.settle()
        np.testing.assert_array_equal(client.value(made), X + 1)
    else:
        world.wait(61)
        assert client.failed[made].kind == "ArrayLost"
    client.delete(unread, made)
    client.release(program)
    assert client.credits == client.sent_runs


def test_an_island_that_does_not_come_back_is_given_up() -> None:
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    program = client.program(chain([cluster.b]))
    (array,) = client.run(program, X)
    world.settle()
    cluster.hosts["b0"].die()
    (late,) = client.run(program, X)
    world.settle()
    assert not client.failed, "it waits"
    world.wait(31)
    world.wait(61)
    assert client.failed[array].kind == "IslandLost"
    assert client.failed[late].kind == "IslandLost"
    other = client.program(chain([cluster.a]))
    (fine,) = client.run(other, X)
    np.testing.assert_array_equal(client.value(fine), X + 1)


def test_slices_move_to_another_island_when_theirs_does_not_come_back() -> None:
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    free = client.slice(1)
    world.settle()
    assert client.bound[free].island == "b" or client.bound[free].island == "a"
    spec = split(free, 1)
    program = client.program(chain([spec]))
    (array,) = client.run(program, X)
    world.settle()
    home = client.bound[free].island
    for name, host in cluster.hosts.items():
        if name.startswith(home):
            host.die()
    world.settle()
    world.wait(31)
    assert client.bound[free].island != home
    assert not client.failed, "its other slice waits for its own island"
    world.wait(61)
    np.testing.assert_array_equal(client.value(array), X + 1)


def given_back(kind: str, cluster: Cluster, given: ArraySpec) -> tuple[int, int, Any]:
    """An array on island b that was made by way of a slice which is given back: it, its program, its value."""
    client, world = cluster.client, cluster.world
    if kind == "intermediate":
        program = client.program(chain([cluster.b, given, cluster.b]))
        (y,) = client.run(program, X)
        value = X + 3
    elif kind == "second result":
        two = (Output(ValueRef(0, 0), cluster.b), Output(ValueRef(0, 0), given))
        program = client.program(msgspec.structs.replace(chain([cluster.b]), outputs=two))
        y, aside = client.run(program, X)
        client.delete(aside)
        value = X + 1
    else:
        program = client.program(copy(given, cluster.b))
        if kind == "input":
            z, value = client.upload(X, given), X
        else:
            on_given = client.program(chain([given]))
            (z,), value = client.run(on_given, X), X + 1
            client.release(on_given)
        (y,) = client.run(program, z)
        client.delete(z)
    client.tell(msg.ReleaseSlice(given.placement.slice))
    world.settle()
    return y, program, value


KINDS = ("input", "result", "intermediate", "second result")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("loss", "island", "released"), diagonal(["host", "both", "link"], ["a", "b"], [True, False])
)
def test_what_was_made_on_a_slice_that_was_given_back_is_made_again(
    kind: str, island: str, loss: str, released: bool
) -> None:
    cluster = Cluster(KINDS.index(kind))
    client, world = cluster.client, cluster.world
    given = split(client.slice(1, island), 1)
    world.settle()
    y, program, value = given_back(kind, cluster, given)
    if released:
        client.release(program)
        world.settle()
    number = given.placement.slice
    assert number not in world.control.sessions.islands.bindings
    if loss == "link":
        world.post(store_of("b0"), CONTROL, msg.ArraysLost((y,)))
        world.settle()
        world.wait(1)
    else:
        cluster.hosts["b0"].crash()
        if loss == "both":
            world.steps(10)
            cluster.hosts["a0"].crash()
        world.settle()
        world.wait(5)
    np.testing.assert_array_equal(client.value(y), value)
    owner = world.client(client.number)
    assert sum(m.slice == number for m in client.of(msg.SliceBound)) >= 2
    assert client.of(msg.ReleaseSlice)[-1] == msg.ReleaseSlice(number)
    assert not owner.slices.borrowed
    assert number not in world.control.sessions.islands.bindings
    assert sum(world.resources.slices.counts().values()) == 2
    assert number in owner.slices.requests, "it may be needed once more"
    client.delete(y)
    if not released:
        client.release(program)
    world.settle()
    assert number not in owner.slices.requests, "nothing leads back to it"
    cluster.idle()


def given_back_on_an_island_that_is_gone(cluster: Cluster) -> int:
    """An array on island b that was made on island a, of which the client has nothing any more."""
    client, world = cluster.client, cluster.world
    given = split(client.slice(1, "a"), 1)
    world.settle()
    y, _, _ = given_back("result", cluster, given)
    client.tell(msg.ReleaseSlice(cluster.a.placement.slice))
    world.settle()
    cluster.hosts["a0"].die()
    world.settle()
    return y


def test_what_a_leased_run_takes_is_dropped_once_more_if_it_was_made_again() -> None:
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    program = client.program(chain([cluster.b]))
    taking = client.program(chain([cluster.b], donated=(0,)))
    (lost,), (kept,) = client.run(program, X), client.run(program, X)
    world.settle()
    world.post(store_of("b0"), CONTROL, msg.ArraysLost((lost,)))
    world.settle()
    results = client.id(), client.id()
    for index, taken in enumerate((lost, kept)):
        client.sent_runs += 1
        client.tell(msg.Run(client.id(), taking, (taken,), (results[index],), 1, index))
    world.settle()
    world.wait(1)
    orders = (msg.Submit, msg.SubmitLeased, msg.Release)
    sent = [one for one in world.to(scheduler_of("b")) if isinstance(one, orders)][-4:]
    assert [type(one) for one in sent] == [msg.Submit, msg.SubmitLeased, msg.Release, orders[1]]
    assert sent[2].arrays == (lost,)
    client.delete(*results)
    client.release(program), client.release(taking)
    cluster.idle()


def test_a_slice_that_was_given_back_and_cannot_be_had_again_holds_up_nobody() -> None:
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    y = given_back_on_an_island_that_is_gone(cluster)
    step = client.program(chain([cluster.b]))
    (fine,) = client.run(step, X)
    np.testing.assert_array_equal(client.value(fine), X + 1)
    cluster.hosts["b0"].crash()
    world.settle()
    (late,) = client.run(step, X)
    world.settle()
    assert not client.failed, "its island may come back"
    for _ in range(3):
        world.wait(31)
    assert client.failed[y].kind == "ArrayLost"
    assert "given back" in client.failed[y].message
    np.testing.assert_array_equal(client.value(fine), X + 1)
    np.testing.assert_array_equal(client.value(late), X + 1)
    assert not world.client(client.number).slices.borrowed


def test_a_client_that_leaves_does_not_wait_for_slices_that_it_gave_back() -> None:
    cluster = Cluster()
    world = cluster.world
    given_back_on_an_island_that_is_gone(cluster)
    cluster.hosts["b0"].crash()
    world.settle()
    assert [one.request.island for one in world.resources.slices.parked] == ["a"]
    world.kill("c")
    world.settle()
    assert not world.resources.slices.parked
    assert not world.resources.slices.counts()


@pytest.mark.parametrize("seed", some(range(10), 8))
@pytest.mark.parametrize("spares", [0, 1])
def test_a_drained_host_leaves_nothing_behind_and_nothing_fails(seed: int, spares: int) -> None:
    cluster = Cluster(seed, spares=spares)
    client, world = cluster.client, cluster.world
    spec = split(client.slice(1), 1)
    world.settle()
    step = client.program(chain([spec], donated=(0,)))
    state = client.upload(X, spec)
    (state,) = client.run(step, state)
    client.checkpoint(state)
    for _ in range(2):
        (state,) = client.run(step, state)
    world.steps(seed * 5)
    victim = client.bound[spec.placement.slice].devices[0].host
    request = client.id()
    client.tell(msg.DrainHost(request, victim))
    for _ in range(2):
        (state,) = client.run(step, state)
    for _ in range(40):
        world.wait(0.2)
    answer = client.answered(request)
    assert answer is not None
    if answer.error is not None:  # two slices were given to an island by name
        assert "no spare host" in answer.error.message
        assert not spares
    else:
        assert cluster.hosts[victim].finished == "drained"
    np.testing.assert_array_equal(client.value(state), X + 5)


def checkpointed(cluster: Cluster) -> tuple[int, str]:
    """An array of host b0 that has a copy on another host, and that host."""
    world = cluster.world
    array = cluster.client.upload(X, cluster.b)
    cluster.client.checkpoint(array)
    world.settle()
    world.wait(1)
    offers = [(to.node, one) for _, to, one in world.sent if isinstance(one, msg.OfferReplica)]
    ((holder, keeper),) = {(offer.host, keeper) for keeper, offer in offers}
    assert holder == "b0"
    return array, keeper


def test_a_drain_ends_though_nobody_could_take_its_copies_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(spares=1)
    client, world = cluster.client, cluster.world
    array, keeper = checkpointed(cluster)
    post, is_full = world.post, True

    def refuse(sender: Address, to: Address, message: object) -> None:
        if isinstance(message, msg.OfferReplica) and is_full:
            sender, to, message = to, CONTROL, msg.Holdings((msg.Holding(message.array, ()),))
        post(sender, to, message)

    monkeypatch.setattr(world, "post", refuse)
    cluster.hosts[keeper].hand_over(())
    cluster.hosts[keeper].crash()
    world.settle()
    world.wait(1)
    request = client.id()
    client.tell(msg.DrainHost(request, "b0"))
    for _ in range(20):
        world.wait(0.2)
    assert client.answered(request) is None
    is_full = False
    for _ in range(60):
        world.wait(0.2)
    answer = client.answered(request)
    assert answer is not None
    assert answer.error is None
    assert cluster.hosts["b0"].finished == "drained"
    np.testing.assert_array_equal(client.value(array), X)


def test_what_is_lost_again_and_again_is_tried_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    array = client.upload(X, cluster.b)
    step = client.program(chain([cluster.b]))
    world.settle()
    tried_s: list[float] = []
    post, error = world.post, ErrorReport.of(HostLost("a link was cut"))

    def lose(sender: Address, to: Address, message: object) -> None:
        if isinstance(message, msg.SegmentDone) and to == CONTROL and len(tried_s) < 11:
            tried_s.append(world.now_s)
            message = msgspec.structs.replace(message, lost=error)
        post(sender, to, message)

    monkeypatch.setattr(world, "post", lose)
    (result,) = client.run(step, array)
    world.settle()
    while len(tried_s) < 11:
        world.wait(min(alarm.due_s for alarm in world.alarms) - world.now_s)
    pauses_s = [after - before for before, after in itertools.pairwise(tried_s)]
    assert pauses_s == pytest.approx([AGAIN_S * 2 ** min(n, DOUBLINGS) for n in range(10)])
    world.wait(AGAIN_S * 2**DOUBLINGS)
    np.testing.assert_array_equal(client.value(result), X + 1)


@pytest.mark.parametrize("seed", some(range(10), 8))
def test_several_hosts_of_an_island_may_be_drained_at_once(seed: int) -> None:
    """The second while the first has its island formed anew, so that no host of it is there."""
    world = World(seed)
    world.controller()
    hosts = {name: SupervisedHost(world, name, "a", 3) for name in ("a0", "a1", "a2")}
    for name in ("s0", "s1"):
        SupervisedHost(world, name, "", spare=True)
    world.settle()
    client: Survivor = world.add(session_of("c"), Survivor)
    world.settle()
    spec = split(client.slice(3, "a"), 3, 6)
    world.settle()
    array = client.upload(np.arange(6), spec)
    world.settle()
    asked = {name: client.id() for name in ("a1", "a2")}
    for name, request in asked.items():
        client.tell(msg.DrainHost(request, name))
    for _ in range(60):
        world.wait(0.2)
    for name, request in asked.items():
        assert client.answered(request) == msg.Answered(request, None)
        assert hosts[name].finished == "drained"
    np.testing.assert_array_equal(client.value(array), np.arange(6))


def test_a_drain_waits_for_a_host_that_is_started_again_but_not_for_ever() -> None:
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    world.kill("a1", "connection lost")
    world.settle()
    request = client.id()
    client.tell(msg.DrainHost(request, "a1"))
    world.settle()
    assert client.answered(request) is None
    for _ in range(100):
        world.wait(1)
    assert "there is no host 'a1'" in error_of(client, request).message


@pytest.mark.parametrize("how", ["made", "uploaded", "copied"])
def test_what_lives_for_a_while_each_time_is_never_given_up(how: str) -> None:
    """Its tries are of no account when the last of them was long ago."""
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    array, value = client.upload(X, cluster.b), X
    if how != "uploaded":
        (array,) = client.run(client.program(chain([cluster.b])), array)
        value = X + 1
    if how == "copied":
        client.checkpoint(array)
    world.settle()
    world.wait(1)
    for _ in range(20):
        cluster.hosts["b0"].crash()
        world.settle()
        world.wait(700)
        np.testing.assert_array_equal(client.value(array), value)


@pytest.mark.parametrize("copied", [False, True])
def test_an_array_that_does_not_arrive_is_tried_for_as_long_as_a_network_takes_to_heal(
    monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    array = client.upload(X, cluster.b)
    if copied:
        client.checkpoint(array)
    world.settle()
    world.wait(1)
    post, error = world.post, ErrorReport.of(HostLost("a link was cut"))
    broken = True

    def lose(sender: Address, to: Address, message: object) -> None:
        if isinstance(message, msg.Uploaded) and to == CONTROL and broken:
            message = msgspec.structs.replace(message, error=error)
        post(sender, to, message)

    monkeypatch.setattr(world, "post", lose)
    cluster.hosts["b0"].crash()
    world.settle()
    for _ in range(60):
        world.wait(0.5)
    (held,) = [each.arrays.held[array] for each in world.control.sessions.clients]
    assert held.error is None
    broken = False
    world.wait(3)
    np.testing.assert_array_equal(client.value(array), X)
    broken = True
    cluster.hosts["b0"].crash()
    world.settle()
    for _ in range(400):
        world.wait(0.5)
    assert held.error is not None
    assert "could not be brought back" in held.error.message


def test_however_many_hosts_are_drained_one_timer_looks_after_them() -> None:
    cluster = Cluster()
    world = cluster.world
    world.settle()
    for _ in range(3):
        world.post(RESOURCES, CONTROL, msg.Draining(("a0",)))
    world.drain(CONTROLLER)
    looks = [a for a in world.alarms if repr(a.note).endswith("_look_at_drained")]
    assert len(looks) == 1


def test_a_copy_on_a_host_that_is_drained_too_does_not_count() -> None:
    cluster = Cluster(spares=1)
    world = cluster.world
    _, keeper = checkpointed(cluster)
    world.post(RESOURCES, CONTROL, msg.Draining(("b0", keeper)))
    world.drain(CONTROLLER)
    (look,) = [alarm for alarm in world.alarms if repr(alarm.note).endswith("_look_at_drained")]
    before = len(world.sent)
    world.post(*(CONTROL, CONTROL, look.note))
    world.drain(CONTROLLER)
    assert not [one for _, _, one in world.sent[before:] if isinstance(one, msg.HostEmptied)]


def test_a_host_that_does_not_exist_cannot_be_drained() -> None:
    cluster = Cluster()
    request = cluster.client.id()
    cluster.client.tell(msg.DrainHost(request, "no-host"))
    cluster.world.settle()
    answer = cluster.client.answered(request)
    assert answer is not None
    assert answer.error is not None
    assert "no-host" in answer.error.message
    assert CONTROL.node == "controller"
