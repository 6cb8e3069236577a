"""`pw.checkpoint`, `pw.drain` and what a session keeps, as a user meets them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pw
from pw.client.checkpoints import files as checkpoint_files
from pw.client.connection import current, waiting
from pw.client.connection.questions import Questions
from pw.client.session.thread_messages import Put
from pw.client.session.uploads import KEEP_BYTES
from pw.testing import InProcessCluster
from tests.stages.daemons import until
from tests.stages.inside import number_of, set_fetching, set_waiting, without_session
from tests.stages.stage import mesh_on, numbers, split

Asked = list[tuple[list[int], "Future[None]"]]
"""The arrays of each checkpoint, and what ends it."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(islands=2, devices_per_island=2) as cluster:
        yield cluster


@pytest.fixture
def mesh(cluster: InProcessCluster) -> pw.Mesh:
    return mesh_on(0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The checkpoints that were asked for; the test plays the cluster."""
    calls: Asked = []

    def checkpoint(self: Questions, arrays: list[int]) -> Future[None]:
        calls.append((list(arrays), Future()))
        return calls[-1][1]

    monkeypatch.setattr(Questions, "checkpoint", checkpoint)
    return calls


# --- checkpoint ------------------------------------------------------------------------------------------


def test_a_tree_is_one_checkpoint_of_its_arrays(mesh: pw.Mesh, asked: Asked) -> None:
    w, n = pw.put(numbers(8), sharding=split(mesh)), pw.put(1.0)
    tree = {"w": w, "state": (n, w, None, 3, 2.5, True), "host": [np.ones(3), jnp.ones(3)]}
    saving = pw.checkpoint(tree)
    ((arrays, future),) = asked
    assert sorted(arrays) == sorted([number_of(w), number_of(w), number_of(n)])
    assert isinstance(saving, pw.Checkpoint)
    assert not saving.done()
    assert repr(saving) == "<pw.Checkpoint: under way>"
    with pytest.raises(TimeoutError):
        saving.result(timeout=0)
    future.set_result(None)
    assert saving.done()
    assert saving.result() is None
    assert repr(saving) == "<pw.Checkpoint: done>"


def test_a_tree_without_arrays_is_safe_already(asked: Asked) -> None:
    assert pw.checkpoint({"n": 1, "x": np.ones(3)}).result(0) is None
    assert not asked


def test_a_failure_is_raised_where_it_is_looked_at_and_logged_anyway(
    mesh: pw.Mesh, asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    saving = pw.checkpoint(pw.put(numbers(8), sharding=split(mesh)))
    with caplog.at_level(logging.WARNING, "pw"):
        asked[0][1].set_exception(pw.HostLost("the host with the copies is gone"))
    assert "checkpoint failed" in caplog.text
    assert "is gone" in caplog.text
    for _ in range(2):
        with pytest.raises(pw.HostLost, match="is gone"):
            saving.result()
    assert "failed, the host" in repr(saving)


@pytest.mark.parametrize("path", [None, "somewhere"])
def test_who_has_waited_in_vain_is_told_what_is_in_the_way(
    mesh: pw.Mesh, path: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "POLL_S", 0.0)
    monkeypatch.setattr(Questions, "in_the_way", lambda self: "The disk is slow")
    for kind in ("checkpoint", "save"):
        monkeypatch.setattr(Questions, kind, lambda self, *_: waiting.Waiting(self.in_the_way))
    x = pw.put(numbers(8), sharding=split(mesh))
    with pytest.raises(TimeoutError, match="The disk is slow"):
        pw.checkpoint(x, path=path).result(timeout=0.01)


@pytest.mark.parametrize(
    ("files_fail", "copies_fail", "words"),
    [
        (False, True, "the host is gone; the files at /there are complete"),
        (True, False, "the disk is full; the replicas in memory are there"),
        (True, True, "the disk is full$"),
    ],
)
def test_the_error_of_one_half_says_that_the_other_is_there(
    mesh: pw.Mesh,
    asked: Asked,
    files_fail: bool,
    copies_fail: bool,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files: Future[None] = Future()
    monkeypatch.setattr(checkpoint_files, "save", lambda *_: files)
    saving = pw.checkpoint(pw.put(numbers(8), sharding=split(mesh)), path="/there")
    lost, full = pw.HostLost("the host is gone"), pw.CheckpointFailed("the disk is full")
    asked[0][1].set_exception(lost) if copies_fail else asked[0][1].set_result(None)
    files.set_exception(full) if files_fail else files.set_result(None)
    with pytest.raises(pw.CheckpointFailed if files_fail else pw.HostLost, match=words):
        saving.result(60)
    assert (str(lost), str(full)) == ("the host is gone", "the disk is full")


def test_it_can_be_awaited_and_does_not_end_with_the_task_that_does(
    mesh: pw.Mesh, asked: Asked
) -> None:
    saving = pw.checkpoint(pw.put(numbers(8), sharding=split(mesh)))

    async def main() -> None:
        async def wait() -> None:
            await saving

        given_up = asyncio.create_task(wait())
        await asyncio.sleep(0)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        asked[0][1].set_result(None)
        await saving

    asyncio.run(main())
    assert saving.done()


@pytest.mark.parametrize("bad", [b"text", object(), lambda: None])
def test_what_cannot_be_in_a_tree_is_named(mesh: pw.Mesh, asked: Asked, bad: Any) -> None:
    x = pw.put(numbers(8), sharding=split(mesh))
    with pytest.raises(pw.ArgumentError, match=r"at \['opt'\]\[1\]"):
        pw.checkpoint({"x": x, "opt": [x, bad]})
    assert not asked


def test_deleted_and_foreign_arrays_are_refused(
    cluster: InProcessCluster, mesh: pw.Mesh, asked: Asked
) -> None:
    x = pw.put(numbers(8), sharding=split(mesh))
    gone = x + 1
    gone.delete()
    with pytest.raises(pw.ArrayDeleted):
        pw.checkpoint([x, gone])
    mine = current.runtime()
    other = cluster.client()
    current.use(other)
    try:
        foreign = pw.put(numbers(8))
    finally:
        current.use(mine)
    with pytest.raises(pw.NotOwner):
        pw.checkpoint([x, foreign])
    assert not asked


def test_it_is_nothing_that_can_be_traced(mesh: pw.Mesh, asked: Asked) -> None:
    x = pw.put(numbers(8), sharding=split(mesh))

    def save(v: Any) -> Any:
        pw.checkpoint(v)
        return v

    for traced in (pw.jit(save, mesh=mesh), pw.program(save), jax.jit(save)):
        with pytest.raises(pw.TracerError, match=r"pw\.checkpoint"):
            traced(x)
    assert not asked


def test_an_array_that_failed_is_not_said_to_be_safe(mesh: pw.Mesh) -> None:
    def fail(x: Any) -> Any:
        raise ValueError("no such value")

    good = pw.put(numbers(8), sharding=split(mesh))
    like = jax.ShapeDtypeStruct((8,), "float32")
    bad = pw.host_function(fail, like, devices=mesh.devices.flat[:1])(good)
    pw.checkpoint(good).result(60)
    with pytest.raises(pw.ComputationFailed, match="no such value"):
        pw.checkpoint([good, bad]).result(60)


# --- drain -----------------------------------------------------------------------------------------------


def test_drain_waits_and_tells_why_not(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts: dict[str, Future[None]] = {name: Future() for name in ("done", "slow", "unknown")}
    monkeypatch.setattr(Questions, "drain", lambda self, host: hosts[host])
    hosts["done"].set_result(None)
    hosts["unknown"].set_exception(pw.ArgumentError("no such host"))
    assert pw.drain("done") is None
    assert pw.drain("done", timeout_s=1.0) is None
    with pytest.raises(TimeoutError):
        pw.drain("slow", timeout_s=0)
    with pytest.raises(pw.ArgumentError, match="no such host"):
        pw.drain("unknown")


# --- what is kept ----------------------------------------------------------------------------------------


@pytest.fixture
def kept(mesh: pw.Mesh, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Size and `keep` of everything that is uploaded."""
    notes: list[tuple[int, bool]] = []
    thread: Any = current.runtime().thread
    post = thread.post

    def note(what: object) -> None:
        if isinstance(what, Put):
            notes.append((what.value.nbytes, what.keep))
        post(what)

    monkeypatch.setattr(thread, "post", note)
    return notes


def test_put_can_exempt_values_from_the_budget(mesh: pw.Mesh, kept: list[tuple[int, bool]]) -> None:
    for size, keep in ((5000, True), (6000, False)):
        pw.block_until_ready(pw.put({"w": numbers(size), "n": 1.0}, mesh.devices, keep=keep))
    assert kept == [(20_000, True), (24_000, False)]


def test_a_kept_value_is_what_it_was(mesh: pw.Mesh) -> None:
    session: Any = current.runtime().thread
    value = numbers(5000)
    x = pw.put(value, sharding=split(mesh))
    value[:] = -1
    np.testing.assert_array_equal(x, numbers(5000))
    inputs = session.node.actors["session"].uploads.inputs
    assert any(np.array_equal(upload.value, numbers(5000)) for upload in list(inputs.values()))


def test_inputs_are_let_go_when_nothing_can_need_them(mesh: pw.Mesh) -> None:
    session: Any = current.runtime().thread
    inputs = session.node.actors["session"].uploads.inputs
    x = pw.put(numbers(5000), sharding=split(mesh), keep=True)
    number = number_of(x)
    x.block_until_ready()
    assert number in inputs
    del x
    until(lambda: number not in inputs, "the value is let go")


@pytest.mark.parametrize(
    ("argument", "variable", "budget"),
    [(None, None, KEEP_BYTES), (None, "1000", 1000), (5, "1000", 5), (0, None, 0)],
)
def test_the_budget_is_an_argument_or_a_variable(
    monkeypatch: pytest.MonkeyPatch, argument: int | None, variable: str | None, budget: int
) -> None:
    if variable is None:
        monkeypatch.delenv("PW_KEEP_BYTES", raising=False)
    else:
        monkeypatch.setenv("PW_KEEP_BYTES", variable)
    made: list[dict[str, Any]] = []
    without_session(monkeypatch)
    monkeypatch.setattr(current, "Runtime", lambda *args, **kwargs: made.append(kwargs))
    pw.connect("tcp://127.0.0.1:1", keep_bytes=argument)
    assert [options["keep_bytes"] for options in made] == [budget]


@pytest.mark.parametrize("wrong", ["-1", "1e9", "256MB"])
def test_a_budget_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    without_session(monkeypatch)
    monkeypatch.setenv("PW_KEEP_BYTES", wrong)
    with pytest.raises(ValueError, match=f"PW_KEEP_BYTES.*'{wrong}'"):
        pw.connect("tcp://127.0.0.1:1")


# --- arrays ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [pw.HostLost, pw.ConnectionFailed, pw.TransferFailed])
def test_a_read_that_failed_on_its_way_is_tried_again(mesh: pw.Mesh, error: type[pw.Error]) -> None:
    x = pw.put(numbers(8), sharding=split(mesh)).block_until_ready()
    failed: Future[Any] = Future()
    failed.set_exception(error("the link was cut"))
    set_fetching(x, failed)
    set_waiting(x, failed)
    assert x.block_until_ready() is x
    np.testing.assert_array_equal(x, numbers(8))


def test_what_an_array_failed_with_is_remembered(mesh: pw.Mesh) -> None:
    x = pw.put(numbers(8), sharding=split(mesh))
    failed: Future[Any] = Future()
    failed.set_exception(pw.ComputationFailed("it raised"))
    set_fetching(x, failed)
    for _ in range(2):
        with pytest.raises(pw.ComputationFailed):
            np.asarray(x)
