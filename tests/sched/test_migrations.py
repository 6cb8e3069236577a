"""What a move waits for while it is prepared, and for how long."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pw.core import messages as msg
from pw.core.ids import CONTROL, RESOURCES
from pw.sched.control.migrations import COMPILED_WITHIN_S, STALLED_S
from pw.sched.control.suspensions import HEARD_S
from tests.stages.actors import World
from tests.stages.scripted import SMALL, Client, chain, join, split


class Moving:
    """A client on an island of two hosts, and another island."""

    def __init__(self) -> None:
        self.world = World(0)
        self.world.controller(island_status=lambda: self.world.resources.status({}))
        for island in ("a", "b"):
            for rank in range(2):
                self.world.host(f"{island}{rank}", island, 2)
        self.world.settle()
        self.client: Client = join(self.world, "client")
        self.slice = self.client.slice(2)
        self.world.settle()
        self.home = self.client.bound[self.slice].island
        self.target = "b" if self.home == "a" else "a"
        spec = split(self.slice, 2)
        self.program = self.client.program(chain([spec]))
        self.value = np.arange(SMALL)
        self.array = self.client.upload(self.value, spec)
        self.world.settle()

    def swallow(self, kind: type) -> None:
        """No host gets a message of this kind."""
        post = self.world.post

        def lossy(sender: Any, to: Any, message: object) -> None:
            if not isinstance(message, kind):
                post(sender, to, message)

        self.world.post = lossy  # type: ignore[method-assign]

    def wait(self, seconds: float) -> None:
        """Let time pass in steps: hosts keep copies now and then."""
        end_s = self.world.now_s + seconds
        while self.world.now_s < end_s:
            self.world.wait(0.1)

    def migrate(self) -> None:
        self.client.tell(msg.MigrateClient(7, self.target))
        self.world.settle()
        self.wait(1.0)

    @property
    def leaves(self) -> bool:
        """Whether launches were held for the move."""
        return any(isinstance(message, msg.HoldLaunches) for _, _, message in self.world.sent)

    def count(self, kind: type) -> int:
        return sum(isinstance(message, kind) for _, _, message in self.world.sent)

    def check_moved(self) -> None:
        """The client is elsewhere, with its value, and no host has a copy of it any more."""
        self.wait(2.0 + HEARD_S)
        assert self.client.bound[self.slice].island == self.target
        np.testing.assert_array_equal(self.client.value(self.array), self.value)
        (result,) = self.client.run(self.program, self.array)
        self.world.settle()
        np.testing.assert_array_equal(self.client.value(result), self.value + 1)
        assert self.answers() == [None]

    def answers(self) -> list[Any]:
        return [one.error for one in self.client.of(msg.Answered) if one.request == 7]

    def copies(self) -> int:
        """How many arrays the hosts have in their memory, together."""
        stores = [of["store"] for of in self.world.actors.values() if "store" in of]
        return sum(store.census()["replica_arrays"] for store in stores)


def test_all_is_there_before_the_client_leaves() -> None:
    moving = Moving()
    moving.migrate()
    moving.check_moved()
    assert moving.count(msg.CompileAhead) == 2
    assert moving.count(msg.OfferReplica) == 2
    assert moving.count(msg.Replicate) == 2, "the array was copied once by each host"
    assert moving.count(msg.FetchReplica) == 2, "and fetched once"
    assert not moving.copies()


def test_a_compilation_that_does_not_end_delays_a_move_so_long() -> None:
    moving = Moving()
    moving.swallow(msg.CompileAhead)
    moving.migrate()
    moving.wait(COMPILED_WITHIN_S - 3)
    assert not moving.leaves
    (result,) = moving.client.run(moving.program, moving.array)
    moving.world.settle()
    np.testing.assert_array_equal(moving.client.value(result), moving.value + 1)
    moving.wait(4)
    assert moving.leaves
    moving.check_moved()


@pytest.mark.parametrize("kind", [msg.OfferReplica, msg.FetchReplica])
def test_a_move_does_not_wait_long_for_copies_of_which_nothing_is_heard(kind: type) -> None:
    moving = Moving()
    post = moving.world.post
    moving.swallow(kind)
    moving.migrate()
    moving.wait(STALLED_S / 2)
    assert not moving.leaves
    moving.world.post = post  # type: ignore[method-assign]
    moving.wait(STALLED_S)
    assert moving.leaves
    moving.check_moved()


def test_a_move_ends_with_its_client() -> None:
    moving = Moving()
    asker = join(moving.world, "operator")
    moving.swallow(msg.CompileAhead)
    number = moving.client.number
    asker.tell(msg.MigrateClient(8, moving.target, number))
    moving.world.settle()
    moving.wait(1.0)
    assert moving.copies()
    moving.world.kill("client")
    moving.world.settle()
    (answer,) = asker.of(msg.Answered)
    assert f"client {number} has left" in answer.error.message
    assert not moving.copies()


def test_a_client_stays_if_the_other_island_is_lost_before_it_moves() -> None:
    moving = Moving()
    moving.swallow(msg.CompileAhead)
    moving.migrate()
    assert moving.copies()
    moving.world.kill(f"{moving.target}0")
    moving.world.settle()
    moving.wait(1.0)
    (error,) = moving.answers()
    assert error.message == "a slice of client 1 has 2 devices, and island 'b' has 0"
    assert not moving.leaves
    assert not moving.copies()
    np.testing.assert_array_equal(moving.client.value(moving.array), moving.value)


def test_devices_that_a_client_gets_for_an_earlier_request_are_not_taken() -> None:
    """It may leave again, or be sent elsewhere, before the controller has heard of them."""
    moving = Moving()
    client, world = moving.client, moving.world
    earlier = client.bound[moving.slice]
    client.tell(msg.SuspendClients(5))
    world.settle()
    moving.wait(HEARD_S + 1.0)
    client.tell(msg.ResumeClients(6))
    world.settle()
    told = client.of(msg.SliceBound)
    assert told[-1].attempt == earlier.attempt + 1
    world.post(RESOURCES, CONTROL, earlier)
    world.settle()
    assert client.of(msg.SliceBound) == told
