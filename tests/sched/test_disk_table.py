"""The right `disk`: saves are counted and refused, and what users delete is noticed. Files are real."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pw.core import messages as msg
from pw.core.errors import ErrorReport
from pw.core.ids import CONTROL, store_of
from pw.core.rights import NewRights, Resource, Rights, Size, TenantRights
from pw.devices.host import checkpoint_format
from pw.sched.control.checkpoints.disk_table import LOOK_S, SOON_S
from tests.sched.test_accounts import Sink
from tests.stages.actors import FakeAside, World
from tests.stages.samples import some
from tests.stages.scripted import Client, chain, join, split

RED, BLUE = "red", "blue"
ARRAY_BYTES = 64


@pytest.fixture(autouse=True)
def disks_do_not_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disks in a test are quick."""
    monkeypatch.setattr(checkpoint_format.os, "fsync", lambda _: None)


class Stage:
    """A host on each of two islands, a client `r` of red on the first, and one of blue on the second.

    Args:
        folder: for checkpoints.
        arrays: number of arrays that fit into the bound of red; blue has none.
        seed: of the world.
        sink: file of accounts.
        first_client: of the controller.
    """

    def __init__(
        self,
        folder: Path,
        arrays: int = 2,
        seed: int = 1,
        sink: Sink | None = None,
        first_client: int = 1,
    ) -> None:
        self.folder, self.arrays = folder, arrays
        self.world = World(seed)
        self.world.controller(
            rights=self.rights(arrays), account_sink=sink, first_client=first_client
        )
        self.world.host("h", "i", 1, 1)
        self.world.host("g", "j", 1, 1)
        self.world.tenants = {"r": RED, "r2": RED, "b": BLUE}
        self.world.settle()
        self.red, self.blue = join(self.world, "r"), join(self.world, "b")
        self.sources = {one: self.array(one, on) for one, on in ((self.red, "i"), (self.blue, "j"))}

    def rights(self, arrays: int | None) -> TenantRights:
        size = None if arrays is None else Size(arrays * ARRAY_BYTES)
        return TenantRights(named={RED: Rights(disk=size)})

    def new_rights(self, arrays: int | None) -> None:
        self.world.post(CONTROL, CONTROL, NewRights(self.rights(arrays)))
        self.world.settle()

    def array(self, client: Client, island: str, count: int = 1) -> list[int]:
        """Return arrays of a client, which have `ARRAY_BYTES` each."""
        slice_ = client.slice(1, island)
        self.world.settle()
        spec = split(slice_, 1)
        assert spec.size_bytes == ARRAY_BYTES
        program = client.program(chain([spec]))
        arrays = [client.run(program, bytes(ARRAY_BYTES))[0] for _ in range(count)]
        self.world.settle()
        return arrays

    def ask(self, client: Client, name: str, count: int = 1) -> int:
        """Ask for a checkpoint of as many arrays; return the request."""
        request = client.id()
        arrays = tuple(self.sources[client] * count)
        names = tuple(f"x{at}" for at in range(count))
        id_ = f"{request:016x}"
        path = f"{self.folder / name}"
        client.tell(msg.SaveArrays(request, id_, path, True, arrays, names, b"[]"))
        return request

    def answer(self, client: Client, request: int) -> ErrorReport | None:
        (answer,) = [one for one in client.of(msg.Answered) if one.request == request]
        return answer.error  # type: ignore[no-any-return]

    def save(self, name: str, count: int = 1, client: Client | None = None) -> ErrorReport | None:
        client = client or self.red
        request = self.ask(client, name, count)
        self.world.settle()
        return self.answer(client, request)

    def has(self) -> float:
        """Number of arrays that red has on disk."""
        return self.world.control.usage.amount(RED, Resource.DISK) / ARRAY_BYTES

    def delete(self, name: str) -> None:
        shutil.rmtree(self.folder / name)

    def looks(self, host: str = "h") -> list[msg.LookForFolders]:
        return self.world.to(store_of(host), msg.LookForFolders)


def test_a_save_beyond_the_bound_is_refused_until_something_is_deleted(tmp_path: Path) -> None:
    stage = Stage(tmp_path, arrays=3)
    assert stage.save("large", 2) is None
    assert stage.save("small") is None
    assert stage.has() == 3
    error = stage.save("more")
    assert error is not None
    assert error.kind == "QuotaExceeded"
    for words in (
        "tenant 'red' has 192 B on disk and may have 192 B on disk",
        f"the checkpoint {tmp_path}/more takes 64 B",
        f"the largest: {tmp_path}/large, 128 B",
        "raise disk in pw-controller --tenants",
        "save again",
    ):
        assert words in error.message
    assert stage.world.control.saves.under_way == {}
    assert not (tmp_path / "more").exists()
    assert not stage.world.to(store_of("h"), msg.AbandonFiles), "no host has heard of it"
    stage.delete("large")
    stage.world.wait(SOON_S)
    assert stage.has() == 1
    assert stage.save("more") is None
    assert stage.has() == 2


def test_what_was_deleted_before_a_refusal_is_noticed_at_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path, arrays=1)
    stage.save("a")
    stage.delete("a")
    assert stage.save("b") is not None
    stage.world.wait(0.0)
    assert stage.save("b") is None


def test_what_can_never_fit_does_not_ask_for_deletes(tmp_path: Path) -> None:
    stage = Stage(tmp_path, arrays=1)
    stage.save("a")
    error = stage.save("b", 2)
    assert error is not None
    assert "Save less, or have the operator raise disk" in error.message


def test_hosts_look_once_a_minute_and_often_after_a_refusal(tmp_path: Path) -> None:
    stage = Stage(tmp_path, arrays=1)
    stage.world.wait(10 * LOOK_S)
    assert not stage.looks()
    stage.save("a")
    for _ in range(3):
        stage.world.wait(LOOK_S)
    assert [look.paths for look in stage.looks()] == [(f"{tmp_path}/a",)] * 3
    stage.save("b")
    stage.save("c")
    before = len(stage.looks())
    for _ in range(3):
        stage.world.wait(SOON_S)
    assert len(stage.looks()) == before + 3
    stage.world.wait(LOOK_S)
    stage.world.wait(SOON_S)
    after = len(stage.looks())
    for _ in range(3):
        stage.world.wait(SOON_S)
    assert len(stage.looks()) == after, "the refusal is a minute old"
    stage.delete("a")
    stage.world.wait(LOOK_S)
    assert stage.has() == 0
    looks = len(stage.looks())
    stage.world.wait(10 * LOOK_S)
    assert len(stage.looks()) == looks, "there is nothing to look for"


def test_a_save_to_the_same_path_replaces_its_bytes(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    assert stage.save("a", 2) is None
    assert stage.save("a", 2) is None, "it needs no room of its own"
    request = stage.ask(stage.red, "a")
    stage.world.steps(3)
    assert stage.has() == 2, "the larger one counts while it is replaced"
    stage.world.settle()
    assert stage.answer(stage.red, request) is None
    assert stage.has() == 1
    assert stage.save("a", 3) is not None
    assert stage.has() == 1


def test_a_save_that_fails_gives_its_bytes_back(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    assert stage.save("a") is None
    (tmp_path / "file").write_text("no folder")
    for name in ("file", "file/b"):
        error = stage.save(name)
        assert error is not None
        assert error.kind.startswith("Checkpoint")
        assert stage.has() == 1


@pytest.mark.parametrize("seed", some(range(60), 12))
@pytest.mark.parametrize("victim", ["client", "host"])
def test_bytes_that_count_are_those_on_disk_whatever_is_lost(
    tmp_path: Path, seed: int, victim: str
) -> None:
    """But for one that replaces a larger one, if the only host is lost before it answers."""
    stage = Stage(tmp_path, arrays=4, seed=seed)
    assert stage.save("old", 2) is None
    stage.ask(stage.red, "old")
    stage.ask(stage.red, "new", 2)
    stage.world.steps(seed)
    stage.world.kill("r" if victim == "client" else "h")
    stage.world.settle()
    if victim == "host":  # it may have put a checkpoint in its place, and not have said so
        stage.world.wait(LOOK_S)
    table = stage.world.control.disk.tenants[RED]
    assert not any(folder.saves for folder in table.values())
    sizes = {path: folder.size_bytes // ARRAY_BYTES for path, folder in table.items()}
    there: dict[str, int] = {}
    for path in tmp_path.iterdir():
        if (path / "manifest.json").exists():
            files = checkpoint_format.manifest_at(f"{path}").files
            there[f"{path}"] = sum(len(one.arrays) for one in files.values())
    assert sizes.keys() == there.keys()
    assert sizes == there or (victim == "host" and all(sizes[one] >= there[one] for one in there))


def test_bytes_stay_when_the_client_leaves_and_other_tenants_are_not_counted(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path)
    stage.save("a", 2)
    stage.save("b", 5, stage.blue)
    assert not stage.world.control.usage.amount(BLUE, Resource.DISK)
    stage.world.kill("r")
    stage.world.settle()
    assert stage.has() == 2
    second = join(stage.world, "r2")
    stage.sources[second] = stage.array(second, "i")
    assert stage.save("c", 1, second) is not None
    stage.save("a", 1, stage.blue)
    assert stage.has() == 0, "what is at the path is another tenant's now"
    assert stage.save("c", 1, second) is None


def test_rights_may_change(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.save("a", 2)
    stage.new_rights(1)
    assert stage.has() == 2
    assert stage.save("a", 1) is None
    stage.new_rights(None)
    assert stage.has() == 0, "nothing is counted without a bound"
    assert stage.save("b", 9) is None
    stage.new_rights(2)
    assert stage.has() == 1, "what was saved meanwhile is not counted"


def test_a_checkpoint_that_was_written_again_is_not_gone(tmp_path: Path) -> None:
    """The host has looked before it was there again, and its answer comes late."""
    stage = Stage(tmp_path)
    stage.save("a")
    stage.delete("a")
    stage.world.alarms, alarms = [], stage.world.alarms
    stage.world.now_s += LOOK_S
    for alarm in alarms:
        if "DiskTable" in repr(alarm.note):
            stage.world.post(CONTROL, CONTROL, alarm.note)
    stage.world.drain("controller")
    (number,) = stage.world.control.disk.looks
    stage.save("a")
    stage.world.settle()
    before = stage.has()
    late = msg.FoldersGone(number, (f"{tmp_path}/a",))
    stage.world.post(store_of("h"), CONTROL, late)
    stage.world.settle()
    assert stage.has() == before == 1


def test_only_the_host_that_was_asked_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(tmp_path)
    stage.save("a")
    monkeypatch.setattr(FakeAside, "call", stuck)
    for _ in range(3):
        stage.world.wait(LOOK_S)
    (look,) = stage.looks()
    for number in (look.look, look.look + 1):
        stage.world.post(store_of("g"), CONTROL, msg.FoldersGone(number, look.paths))
    stage.world.settle()
    assert stage.has() == 1
    stage.world.post(store_of("h"), CONTROL, msg.FoldersGone(look.look, look.paths))
    stage.world.settle()
    assert stage.has() == 0


def stuck(aside: FakeAside, work: Any, done: Any) -> None:
    """Do nothing, as if the file system of a host did not answer."""


def test_another_host_looks_if_the_writer_is_not_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(tmp_path)
    stage.save("a")
    stage.save("b")
    monkeypatch.setattr(FakeAside, "call", stuck)
    stage.world.wait(LOOK_S)
    assert (len(stage.looks("h")), len(stage.looks("g"))) == (1, 0)
    stage.world.kill("h")
    stage.world.settle()
    monkeypatch.undo()
    stage.delete("a")
    stage.world.wait(LOOK_S)
    assert (len(stage.looks("h")), len(stage.looks("g"))) == (1, 1)
    assert stage.has() == 1
    stage.delete("b")
    stage.world.wait(LOOK_S)
    assert stage.has() == 1, (
        "the other host sees none of them: perhaps its file system is another one"
    )


def test_a_later_controller_goes_on_from_the_accounts(tmp_path: Path) -> None:
    sink = Sink()
    stage = Stage(tmp_path, arrays=3, sink=sink)
    stage.save("a", 2)
    stage.save("b")
    stage.delete("b")
    stage.world.wait(LOOK_S)
    sink.has_room = False
    stage.save("c")
    assert [(one.path[-1], one.size_bytes, one.host) for one in sink.folders()] == [("a", 128, "h")]
    sink.has_room = True
    stage.world.wait(LOOK_S)
    assert len(sink.folder_entries) == 4, "one for each change"
    stage = Stage(tmp_path, arrays=3, sink=sink, first_client=1000)
    assert stage.has() == 3
    assert stage.save("d") is not None
    stage.delete("a")
    stage.world.wait(SOON_S)
    assert stage.has() == 1
    assert [one.path[-1] for one in sink.folders()] == ["c"]


def test_what_a_later_controller_asks_is_not_answered_by_an_earlier_look(tmp_path: Path) -> None:
    sink = Sink()
    first = Stage(tmp_path, sink=sink)
    first.save("a")
    first.world.wait(LOOK_S)
    second = Stage(tmp_path, sink=sink, first_client=2)
    second.world.wait(LOOK_S)
    assert first.looks()[-1].look < second.looks()[0].look


def test_the_status_has_it(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.save("a")
    stage.red.tell(msg.GetStatus(1))
    stage.world.settle()
    (red,) = stage.red.of(msg.Status)[-1].tenants
    assert (red.amounts["disk"], red.bounds["disk"]) == (64, 128)
