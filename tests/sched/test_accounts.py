"""Accounts: each use is in one entry, whatever becomes of its client, the disk and the controller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from pw.core import messages as msg
from pw.core.accounts import AccountEntry, Spent
from pw.devices.host.edges_out import REPORT_S
from pw.sched.control.accounts import ENTRIES_S
from tests.stages.actors import World
from tests.stages.scripted import LARGE, SMALL, Client, chain, join, split


class Sink:
    """Keeps entries in a list, if there is room."""

    def __init__(self) -> None:
        self.settle: Callable[[], object] = lambda: None
        self.entries: list[AccountEntry] = []
        self.has_room = True

    def sums(self) -> Mapping[str, Spent]:
        sums: dict[str, Spent] = {}
        for entry in self.entries:
            sums.setdefault(entry.tenant, Spent()).add(entry)
        return sums

    def write(self, entries: Sequence[AccountEntry]) -> bool:
        if self.has_room:
            self.entries += entries
        return self.has_room

    def launches(self) -> Counter[int]:
        counts: Counter[int] = Counter()
        for entry in self.entries:
            counts[entry.client] += entry.launches
        return counts


class Stage:
    """One host, and clients `red` and `blue` of the tenants of these names."""

    def __init__(self, sink: Sink | None = None, first_client: int = 1) -> None:
        self.world, self.sink = World(1), sink or Sink()
        self.world.controller(account_sink=self.sink, first_client=first_client)
        self.world.host("h0", "i", 1, 2)
        self.world.tenants = {"red": "red", "blue": "blue"}
        self.world.settle()
        self.red, self.blue = join(self.world, "red"), join(self.world, "blue")

    def calls(self, client: Client, count: int) -> None:
        slice_ = client.slice(1)
        self.world.settle()
        spec = split(slice_, 1)
        program = client.program(chain([spec]))
        for _ in range(count):
            client.run(program, np.arange(SMALL))
        self.world.settle()

    def spent(self, client: Client) -> dict[str, dict[str, float]]:
        client.tell(msg.GetStatus(1))
        self.world.settle()
        return {one.name: one.spent for one in client.of(msg.Status)[-1].tenants}


def test_a_client_has_an_entry_a_minute_if_it_has_used_something() -> None:
    stage = Stage()
    stage.calls(stage.red, 3)
    assert not stage.sink.entries
    stage.world.wait(ENTRIES_S)
    assert stage.sink.launches() == {stage.red.number: 3}
    (entry,) = stage.sink.entries
    assert (entry.tenant, entry.name, entry.leaves) == ("red", "red", False)
    stage.calls(stage.blue, 2)
    stage.world.wait(ENTRIES_S)
    assert stage.sink.launches() == {stage.red.number: 3, stage.blue.number: 2}


@pytest.mark.parametrize("elements", [SMALL, LARGE])
@pytest.mark.parametrize("leaves", [False, True])
def test_bytes_between_hosts_are_counted_for_the_tenant(elements: int, leaves: bool) -> None:
    """In a message or over the bulk plane; also if the hosts tell of them after the client has left."""
    stage = Stage()
    stage.world.host("h1", "j", 1, 2)
    stage.world.settle()
    here, there = stage.red.slice(1, "i"), stage.red.slice(1, "j")
    stage.world.settle()
    source, target = split(here, 1, elements), split(there, 1, elements)
    array = stage.red.upload(np.arange(elements), source)
    program = stage.red.program(chain([source, target]))
    for _ in range(3):
        stage.red.run(program, array)
    stage.world.settle()
    if leaves:
        stage.world.kill("red")
        stage.world.settle()
    assert not any(entry.moved_bytes for entry in stage.sink.entries)
    stage.world.wait(REPORT_S)
    stage.world.wait(ENTRIES_S)
    assert stage.sink.sums()["red"].moved_bytes == 3 * source.size_bytes
    assert stage.spent(stage.blue).keys() == {"blue"}


def test_the_last_entry_says_that_the_client_leaves() -> None:
    stage = Stage()
    stage.calls(stage.red, 3)
    stage.world.kill("red")
    stage.world.kill("blue")
    stage.world.settle()
    (entry,) = stage.sink.entries
    assert (entry.tenant, entry.launches, entry.leaves) == ("red", 3, True)
    assert not stage.world.control.accounts.unwritten


def test_launches_that_end_after_their_client_has_left_are_in_an_entry() -> None:
    for seed in range(20):
        stage = Stage()
        stage.world.random.seed(seed)
        slice_ = stage.red.slice(1)
        stage.world.settle()
        program = stage.red.program(chain([split(slice_, 1)]))
        stage.world.settle()
        for _ in range(5):
            stage.red.run(program, np.arange(SMALL))
        stage.world.steps(seed)
        stage.world.kill("red")
        stage.world.settle()
        stage.world.wait(ENTRIES_S)
        stage.world.wait(ENTRIES_S)
        scheduler = stage.world.schedulers["i"]
        entries = stage.sink.entries
        assert sum(entry.device_s for entry in entries) == pytest.approx(scheduler.device_s)
        assert scheduler.spending.untaken_s == 0.0
        assert {entry.tenant for entry in entries} <= {"red"}


def test_entries_wait_while_the_disk_is_full() -> None:
    stage = Stage()
    stage.sink.has_room = False
    stage.calls(stage.red, 3)
    stage.world.wait(ENTRIES_S)
    stage.calls(stage.red, 1)
    stage.world.kill("red")
    stage.world.settle()
    assert not stage.sink.entries
    stage.sink.has_room = True
    stage.world.wait(ENTRIES_S)
    (entry,) = stage.sink.entries
    assert (entry.launches, entry.leaves) == (4, True)


def test_a_later_controller_goes_on() -> None:
    stage = Stage()
    stage.calls(stage.red, 3)
    stage.sink.settle()  # as a controller does that ends
    later = Stage(stage.sink, 1000)
    later.calls(later.red, 2)
    assert later.spent(later.red)["red"]["launches"] == 5
    assert "blue" not in later.spent(later.red)
    later.sink.settle()
    assert later.sink.sums()["red"].launches == 5


def test_memory_and_uploads_count() -> None:
    stage = Stage()
    slice_ = stage.red.slice(1)
    stage.world.settle()
    spec = split(slice_, 1, LARGE)
    stage.red.upload(np.arange(LARGE), spec)
    stage.world.settle()
    stage.world.wait(ENTRIES_S)
    (entry,) = stage.sink.entries
    assert entry.uploaded_bytes == spec.size_bytes
    assert entry.memory_byte_s == spec.size_bytes * ENTRIES_S
