"""Checkpoints on disk while hosts and clients come and go: whole or not at all, and always answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pw.client.session.thread_messages import Tell
from pw.core import messages as msg
from pw.core.errors import ErrorReport
from pw.core.ids import scheduler_of
from pw.devices.host import checkpoint_format
from pw.devices.host import checkpoint_reader as disk_reader
from pw.sched.control.checkpoints import on_disk
from tests.sched import test_controller_restart as restart
from tests.sched.test_rebuild import Cluster, Survivor
from tests.stages.actors import FakeAside
from tests.stages.samples import parts, some
from tests.stages.scripted import chain

X = np.arange(8)


@pytest.fixture(autouse=True)
def disks_do_not_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disks in a test are quick."""
    monkeypatch.setattr(checkpoint_format.os, "fsync", lambda _: None)


class Writer:
    """A cluster with an array on each of its islands, and a place for checkpoints."""

    def __init__(self, seed: int, path: Path) -> None:
        self.path = path / f"{seed}" / "last"
        self.cluster = Cluster(seed)
        self.client: Survivor = self.cluster.client
        self.world = self.cluster.world
        self.serial = 0
        self.there = self.client.program(chain([self.cluster.a], donated=(0,)))
        (self.x,) = self.client.run(self.there, X)
        self.here = self.client.program(chain([self.cluster.b]))
        (self.y,) = self.client.run(self.here, X)

    def step(self) -> None:
        (self.x,) = self.client.run(self.there, self.x)

    def save(self, overwrite: bool = True) -> int:
        request, self.serial = self.client.id(), self.serial + 1
        id_ = f"{self.serial:016x}"
        self.client.tell(
            msg.SaveArrays(
                request, id_, f"{self.path}", overwrite, (self.x, self.y), ("x", "y"), b"[]"
            )
        )
        return request

    def error(self, request: int) -> ErrorReport | None:
        answer = self.client.answered(request)
        assert answer is not None, "a checkpoint is never answered"
        return answer.error

    def on_disk(self) -> tuple[Any, Any] | None:
        """What the checkpoint at the path has; None if there is none."""
        if not self.path.exists():
            return None
        id_, _ = checkpoint_format.describe(f"{self.path}")
        reader = disk_reader.CheckpointReader(f"{self.path}", id_)

        def read(name: str, spec: Any) -> Any:
            source = msg.FileSource(f"{self.path}", id_, name)
            return reader.read(source, spec, [((0, len(X)),)])[0]

        return read("x", self.cluster.a), read("y", self.cluster.b)

    def end(self, *arrays: int) -> None:
        """The client lets go of all it has: nothing of it is left."""
        self.client.delete(self.x, self.y, *arrays)
        self.client.release(self.there), self.client.release(self.here)
        self.cluster.idle()

    def begun(self) -> int:
        """How many checkpoints hosts have been told to write."""
        sent = self.world.to(scheduler_of("a"), msg.CopyArrays)
        return len({file.checkpoint for copy in sent for _, file in copy.files})

    def stepped(self) -> int:
        """How many steps have been handed to the scheduler."""
        return len(self.world.to(scheduler_of("a"), msg.Submit)) - 1

    def junk(self) -> set[str]:
        if not self.path.parent.exists():
            return set()
        return {entry.name for entry in self.path.parent.iterdir()} - {"last"}


@pytest.fixture(params=parts(range(40), 8), ids=["few", "all others"])
def writers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[int, Writer]]:
    """Writers with other seeds, each with its seed."""
    return ((seed, Writer(seed, tmp_path)) for seed in request.param)


def test_it_is_written_between_the_runs_before_and_after(
    writers: Iterator[tuple[int, Writer]],
) -> None:
    for _, writer in writers:
        writer.step()
        first = writer.save()
        writer.step()
        second = writer.save()
        writer.step()
        writer.world.settle()
        assert writer.error(first) is None
        assert writer.error(second) is None
        found = writer.on_disk()
        assert found is not None
        np.testing.assert_array_equal(found[0], X + 3)
        np.testing.assert_array_equal(found[1], X + 1)
        assert not writer.junk()
        np.testing.assert_array_equal(writer.client.value(writer.x), X + 4)
        writer.end()


@pytest.mark.parametrize("victim", ["a0", "a1", "b0"])
@pytest.mark.parametrize("old", [False, True])
def test_a_host_may_be_lost_at_any_moment(
    writers: Iterator[tuple[int, Writer]], victim: str, old: bool
) -> None:
    outcomes = set()
    for seed, writer in writers:
        if old:
            before = writer.save()
            writer.world.settle()
            assert writer.error(before) is None
        writer.step()
        asked = writer.save()
        writer.world.steps(seed * 2)
        writer.cluster.hosts[victim].crash()
        writer.step()
        writer.world.settle()
        writer.world.wait(5)
        assert not writer.junk(), "the next checkpoint has removed it"
        error, found = writer.error(asked), writer.on_disk()
        outcomes.add(error is None)
        if error is None:
            assert found is not None
            np.testing.assert_array_equal(found[0], X + 2)
        else:
            assert error.kind in ("HostLost", "CheckpointFailed"), error
            assert (found is not None) == old
        if found is not None:
            assert found[0][0] in (1, 2)
            np.testing.assert_array_equal(found[0], X + found[0][0])
        writer.client.value(writer.x)
        after = writer.save()
        writer.world.settle()
        assert writer.error(after) is None
        assert not writer.junk()
        found = writer.on_disk()
        assert found is not None
        np.testing.assert_array_equal(found[0], X + 3)
        writer.end()
    assert outcomes == {True, False}


@pytest.mark.parametrize("seeds", parts(range(40), 8))
def test_nothing_is_left_by_the_only_host_that_could_write(
    tmp_path: Path, seeds: list[int]
) -> None:
    lost = 0
    for seed in seeds:
        writer = Writer(seed, tmp_path)
        request, path = writer.client.id(), f"{writer.path}"
        writer.client.tell(
            msg.SaveArrays(request, f"{seed:016x}", path, True, (writer.y,), ("y",), b"[]")
        )
        writer.world.steps(seed * 2)
        writer.cluster.hosts["b0"].crash()
        writer.world.settle()
        writer.world.wait(5)
        error = writer.error(request)
        lost += error is not None
        assert error is None or error.kind == "HostLost"
        assert not writer.junk()
        assert not writer.world.control.saves.leftovers
        writer.client.value(writer.y)
        writer.end()
    assert 0 < lost < len(seeds)


def test_a_client_may_be_lost_at_any_moment(writers: Iterator[tuple[int, Writer]]) -> None:
    for seed, writer in writers:
        writer.save()
        writer.world.steps(seed * 3)
        writer.world.kill("c")
        writer.world.settle()
        assert not writer.junk()
        found = writer.on_disk()
        if found is not None:
            np.testing.assert_array_equal(found[0], X + 1)
        assert not writer.world.control.saves.under_way
        writer.cluster.idle()


def test_what_was_read_from_disk_is_read_again_when_its_host_is_lost(
    writers: Iterator[tuple[int, Writer]],
) -> None:
    ends = set()
    for seed, writer in writers:
        client, world = writer.client, writer.world
        asked = writer.save()
        world.settle()
        assert writer.error(asked) is None
        id_, _ = checkpoint_format.describe(f"{writer.path}")
        client.delete(writer.x, writer.y)
        array = client.id()
        spec = client.specs[array] = writer.cluster.a
        client.tell(msg.CreateArray(array, spec, source=msg.FileSource(f"{writer.path}", id_, "x")))
        program = client.program(chain([spec]))
        (more,) = client.run(program, array)
        world.steps(seed * 2)
        writer.cluster.hosts[f"a{seed % 2}"].crash()
        world.settle()
        world.wait(5)
        np.testing.assert_array_equal(client.value(array), X + 1)
        np.testing.assert_array_equal(client.value(more), X + 2)
        (writer.path / "manifest.json").unlink()
        writer.cluster.hosts["a0"].crash()
        world.settle()
        world.wait(5)
        value = client.value(array)
        ends.add(value.kind if isinstance(value, ErrorReport) else "it was handed over")
        client.release(program)
        writer.end(array, more)
    assert ends <= {"CheckpointNotFound", "it was handed over"}
    assert "CheckpointNotFound" in ends


@pytest.fixture
def disk_calls(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """What hosts would do with the disk: it is done when the test does it."""
    calls: list[Callable[[], Any]] = []

    def call(self: Any, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        calls.append(lambda: done(work()))

    monkeypatch.setattr(FakeAside, "call", call)
    return calls


def test_where_the_disk_is_too_slow_the_third_waits_with_all_that_is_behind_it(
    tmp_path: Path, disk_calls: list[Callable[[], Any]]
) -> None:
    """Each has all that it writes in host memory, so no more than two may be under way."""
    writer = Writer(0, tmp_path)
    client, world = writer.client, writer.world
    saves = []
    for number in range(5):
        writer.path = tmp_path / f"{number}"
        saves.append(writer.save())
        writer.step()
    world.settle()
    assert (writer.begun(), writer.stepped()) == (2, 2)
    assert "waits for 2 checkpoints that are still being written to disk" in client.why()
    for number, save in enumerate(saves):
        assert client.answered(save) is None
        while client.answered(save) is None:
            assert (writer.begun(), writer.stepped()) == (min(number + 2, 5),) * 2
            disk_calls.pop(0)()
            world.settle()
        assert writer.error(save) is None
    assert client.why() == "Nothing is under way"
    found = writer.on_disk()
    assert found is not None
    np.testing.assert_array_equal(found[0], X + 5)
    np.testing.assert_array_equal(client.value(writer.x), X + 6)
    writer.end()


def test_one_waits_while_another_is_put_in_its_place_at_the_same_path(
    tmp_path: Path, disk_calls: list[Callable[[], Any]]
) -> None:
    """What it writes would be removed with what is left there of none."""
    writer = Writer(0, tmp_path)
    client, world = writer.client, writer.world
    first = writer.save()
    world.settle()
    for _ in range(len(disk_calls)):
        disk_calls.pop(0)()
    world.settle()
    assert len(disk_calls) == 1, "it is about to be committed"
    writer.step()
    second = writer.save()
    world.settle()
    assert f"an earlier checkpoint to be put in its place at {writer.path}" in client.why()
    while disk_calls:  # the newest first
        disk_calls.pop()()
        world.settle()
    assert writer.error(first) is None
    assert writer.error(second) is None
    found = writer.on_disk()
    assert found is not None
    np.testing.assert_array_equal(found[0], X + 2)
    writer.end()


@pytest.mark.parametrize("victim", ["a0", "b0", "c"])
def test_those_that_wait_for_others_go_on_whatever_becomes_of_these(
    writers: Iterator[tuple[int, Writer]], victim: str
) -> None:
    for seed, writer in writers:
        saves = []
        for _ in range(5):
            saves.append(writer.save())
            writer.step()
        writer.world.steps(seed * 6)
        if victim == "c":
            writer.world.kill("c")
            writer.world.settle()
            assert not writer.world.control.saves.under_way
            assert not writer.junk()
            writer.cluster.idle()
            continue
        writer.cluster.hosts[victim].crash()
        writer.world.settle()
        writer.world.wait(5)
        errors = [writer.error(save) for save in saves]
        assert {error.kind for error in errors if error} <= {"HostLost", "CheckpointFailed"}
        last = writer.save()
        writer.world.settle()
        assert writer.error(last) is None
        assert not writer.junk()
        np.testing.assert_array_equal(writer.client.value(writer.x), X + 6)
        writer.end()


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    writer = Writer(0, tmp_path)
    good: dict[str, Any] = {
        "checkpoint": "0123456789abcdef",
        "path": f"{writer.path}",
        "arrays": (writer.x,),
        "names": ("x",),
    }
    for bad, kind in (
        ({"checkpoint": "../../../etc"}, "ProtocolError"),
        ({"checkpoint": ""}, "ProtocolError"),
        ({"path": "relative"}, "CheckpointFailed"),
        ({"arrays": (), "names": ()}, "ProtocolError"),
        ({"names": ("x", "y")}, "ProtocolError"),
        ({"arrays": (1,)}, "NotOwner"),
        ({"arrays": (writer.client.id(),)}, "ArrayDeleted"),
    ):
        fields = good | bad
        request = writer.client.id()
        writer.client.tell(
            msg.SaveArrays(
                request,
                fields["checkpoint"],
                fields["path"],
                False,
                fields["arrays"],
                fields["names"],
                b"[]",
            )
        )
        writer.world.settle()
        error = writer.error(request)
        assert error is not None
        assert error.kind == kind
    assert not writer.path.parent.exists()
    writer.end()


def test_what_no_message_could_tell_a_host_is_refused_and_nothing_else_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(0, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(on_disk, "OBJECTS", 10)
        refused = writer.save()
        writer.world.settle()
    error = writer.error(refused)
    assert error is not None
    assert "several checkpoints" in error.message
    saved = writer.save()
    writer.world.settle()
    assert writer.error(saved) is None
    writer.end()


@pytest.mark.parametrize("seed", some(range(20), 8))
def test_another_controller_has_it_written_and_read(seed: int, tmp_path: Path) -> None:
    cluster = restart.Cluster(seed)
    user, world, path, id_ = cluster.user, cluster.world, f"{tmp_path}/last", f"{seed:016x}"
    program = user.program(chain([cluster.a]))
    x = user.run(program, X.tobytes())
    saving = user.ask(
        lambda request: msg.SaveArrays(request, id_, path, False, (x,), ("x",), b"[]"), x
    )
    world.steps(seed * 2)
    cluster.lose()
    world.steps(seed)
    cluster.start()
    cluster.time(20)
    assert saving.done(), "a checkpoint is never answered"
    saving.result(0)
    assert entries(tmp_path) == {"last"}
    array = user.id()
    user.specs[array] = cluster.a
    user.note(Tell(msg.CreateArray(array, cluster.a, source=msg.FileSource(path, id_, "x"))))
    more = user.run(program, array)
    world.steps(seed * 2)
    cluster.lose()
    world.steps(seed)
    if seed % 4:
        cluster.hosts["a1"].crash()
    cluster.start()
    cluster.time(20)
    np.testing.assert_array_equal(user.value(array), X + 1)
    np.testing.assert_array_equal(user.value(more), X + 2)
    user.delete(x, array, more)
    user.release(program)
    cluster.idle()


@pytest.mark.parametrize("seed", some(range(30), 8))
def test_another_controller_finds_it_done_although_its_arrays_were_donated(
    seed: int, tmp_path: Path
) -> None:
    cluster = restart.Cluster(seed)
    user, world, path, id_ = cluster.user, cluster.world, tmp_path / "last", f"{seed:016x}"
    program = user.program(chain([cluster.a], donated=(0,)))
    x = user.run(program, X.tobytes())
    saving = user.ask(
        lambda request: msg.SaveArrays(request, id_, f"{path}", False, (x,), ("x",), b"[]"), x
    )
    more = user.run(program, x)
    if seed < 20:
        world.steps(seed * 3)
    else:  # it is there, and no controller has heard of it
        while not path.exists():
            world.steps(1)
    cluster.lose()
    if seed % 2:
        world.steps(seed)
    cluster.start()
    world.steps(seed * 5)
    if seed % 5 == 0:
        cluster.hosts["a0"].crash()
    cluster.time(20)
    assert saving.done(), "a checkpoint is never answered"
    error = saving.exception(0)
    assert entries(tmp_path) == (set() if error else {"last"})
    assert error is None or (seed < 20 and type(error).__name__ in ("ArrayDeleted", "HostLost"))
    np.testing.assert_array_equal(user.value(more), X + 2)
    (client,) = world.control.sessions.clients
    assert not world.control.saves.count(client)
    assert not world.control.checkpoints.count(client)
    assert not world.control.saves.under_way
    user.delete(more)
    user.release(program)
    cluster.idle()


@pytest.mark.parametrize("seed", some(range(20), 8))
def test_another_controller_goes_on_with_those_that_wait_for_others(
    seed: int, tmp_path: Path
) -> None:
    cluster = restart.Cluster(seed)
    user, world = cluster.user, cluster.world
    program = user.program(chain([cluster.a]))
    arrays = [user.run(program, X.tobytes())]
    asked = []

    def save(number: int) -> Callable[[int], msg.SaveArrays]:
        id_, array = f"{number:016x}", arrays[-1]
        return lambda request: msg.SaveArrays(
            request, id_, f"{tmp_path}/{number}", False, (array,), ("x",), b"[]"
        )

    for number in range(5):
        asked += [user.ask(save(number), arrays[-1]), user.checkpoint(arrays[-1])]
        arrays.append(user.run(program, arrays[-1]))
    world.steps(seed * 4)
    cluster.lose()
    world.steps(seed)
    cluster.start()
    cluster.time(20)
    for checkpoint in asked:
        assert checkpoint.done(), "a checkpoint is never answered"
        checkpoint.result(0)
    assert entries(tmp_path) == {f"{number}" for number in range(5)}
    (client,) = world.control.sessions.clients
    assert not client.stream
    assert not world.control.saves.count(client)
    assert not world.control.checkpoints.count(client)
    np.testing.assert_array_equal(user.value(arrays[-1]), X + 6)
    user.delete(*arrays)
    user.release(program)
    cluster.idle()


def entries(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def test_an_array_on_a_slice_that_was_released_is_not_saved(tmp_path: Path) -> None:
    """The controller did not know its devices any more, and its handler raised."""
    writer = Writer(0, tmp_path)
    writer.world.settle()
    client = writer.client
    client.tell(msg.ReleaseSlice(writer.cluster.b.placement.slice))
    saved, copied = writer.save(), client.id()
    client.tell(msg.Checkpoint(copied, (writer.y,)))
    writer.world.settle()
    for request in (saved, copied):
        error = writer.error(request)
        assert error is not None
        assert error.kind == "PlacementError"
