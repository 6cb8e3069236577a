"""Streams: Python generators that feed programs."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.building.feeding.source import SAVED_BYTES, Position
from pw.client.connection import current
from pw.core.functions.feeding import Feeder, Note, note_of
from pw.core.functions.parts import whole_share
from pw.core.programs.trees import PlainTree
from pw.testing import InProcessCluster
from tests.stages.daemons import until
from tests.stages.samples import diagonal

LIKE = {
    "tokens": jax.ShapeDtypeStruct((4, 3), jnp.int32),
    "number": jax.ShapeDtypeStruct((), "int64"),
}


def counting(count: int) -> Callable[[], Iterator[Any]]:
    """A generator function of so many elements; pickled with what it needs."""

    def elements() -> Iterator[Any]:
        for number in range(count):
            yield {"tokens": np.full((4, 3), number, np.int32), "number": np.int64(number)}

    return elements


@pytest.fixture(scope="module")
def mesh() -> Iterator[pw.Mesh]:
    with InProcessCluster(islands=1, devices_per_island=2):
        yield pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2).devices, ("x",))


def rows(mesh: pw.Mesh) -> dict[str, Any]:
    return {"tokens": pw.NamedSharding(mesh, P("x")), "number": pw.NamedSharding(mesh, P())}


@pytest.mark.parametrize("where", ["hosts", "client"])
def test_elements_come_in_order_until_the_end(mesh: pw.Mesh, where: Any) -> None:
    stream = pw.stream(counting(5), LIKE, sharding=rows(mesh), where=where)
    total = pw.jit(lambda tokens: tokens.sum(), mesh=mesh)
    seen = []
    for batch in stream:
        assert batch["tokens"].sharding == pw.NamedSharding(mesh, P("x"))
        seen.append((int(batch["number"]), int(total(batch["tokens"]))))
    assert seen == [(number, 12 * number) for number in range(5)]
    assert list(stream) == []
    assert (stream.position, stream.where) == (5, where)


@pytest.mark.parametrize("where", ["hosts", "client"])
def test_what_the_generator_raises_is_raised_at_the_element(mesh: pw.Mesh, where: Any) -> None:
    def elements() -> Iterator[Any]:
        yield {"tokens": np.zeros((4, 3), np.int32), "number": np.int64(0)}
        raise ValueError("no such file")

    stream = pw.stream(elements, LIKE, sharding=rows(mesh), where=where)
    assert int(next(stream)["number"]) == 0
    for _ in range(2):
        with pytest.raises(Exception, match="no such file") as caught:
            next(stream)
        notes = "".join(getattr(caught.value, "__notes__", ()))
        assert where == "client" or "in elements" in notes


BAD_ELEMENTS = [
    (lambda: {"tokens": np.zeros((4, 2), np.int32), "number": np.int64(0)}, r"int32\[4,2\]"),
    (lambda: {"tokens": np.zeros((4, 3), np.int64), "number": np.int64(0)}, r"int64\[4,3\]"),
    (lambda: np.zeros((4, 3), np.int32), r"it returned \*, but \{'number': \*, 'tokens': \*\}"),
    (lambda: {"tokens": np.zeros((4, 3), np.int32)}, "'number': "),
]


@pytest.mark.parametrize(("element", "where"), diagonal(BAD_ELEMENTS, ["hosts", "client"]))
def test_elements_that_were_not_declared(
    mesh: pw.Mesh, element: tuple[Callable[[], Any], str], where: Any
) -> None:
    make, words = element
    stream = pw.stream(lambda: iter([make()]), LIKE, sharding=rows(mesh), where=where)
    with pytest.raises(pw.ResultMismatch, match=words):
        next(stream)


def test_bad_calls(mesh: pw.Mesh) -> None:
    with pytest.raises(pw.ArgumentError, match="cannot begin anew"):
        pw.stream(iter([1]), LIKE)
    with pytest.raises(pw.ArgumentError, match="no function and no iterable"):
        pw.stream(3, LIKE)
    with pytest.raises(pw.ArgumentError, match=r"must be a tree of jax\.ShapeDtypeStruct"):
        pw.stream(counting(1), {"tokens": 3})
    with pytest.raises(pw.ArgumentError, match="prefetch of the stream 'elements' is 0"):
        pw.stream(counting(1), LIKE, prefetch=0)
    with pytest.raises(pw.ShardingError, match="does not divide"):
        sharding = pw.NamedSharding(mesh, P(None, "x"))
        pw.stream(counting(1), LIKE["tokens"], sharding=sharding)
    lock = threading.Lock()

    def elements() -> Iterator[Any]:
        yield lock.locked()

    with pytest.raises(pw.ArgumentError, match="stream 'elements' cannot be sent to hosts"):
        next(pw.stream(elements, LIKE, sharding=rows(mesh), where="hosts"))


def test_it_works_ahead_as_far_as_it_may(mesh: pw.Mesh, tmp_path: Path) -> None:
    made = tmp_path / "made"

    def elements() -> Iterator[Any]:
        for number in range(100):
            made.write_text(str(number + 1))
            yield {"tokens": np.full((4, 3), number, np.int32), "number": np.int64(number)}

    stream = pw.stream(elements, LIKE, sharding=rows(mesh), prefetch=3)
    held = [next(stream) for _ in range(4)]
    status = current.runtime().ask.status
    until(lambda: not any(client.runs for client in status().clients), "all elements are made")
    assert int(made.read_text()) == 4 + 3, "four were handed out, and three wait"
    assert [int(batch["number"]) for batch in held] == [0, 1, 2, 3]


def test_an_iterable_is_iterated_over_on_the_hosts(mesh: pw.Mesh) -> None:
    like = jax.ShapeDtypeStruct((2,), jnp.float32)
    data = [np.full(2, number, np.float32) for number in range(3)]
    found = [np.asarray(x)[0] for x in pw.stream(data, like, devices=mesh.devices)]
    assert found == [0, 1, 2]


def test_the_process_of_a_stream_may_end(mesh: pw.Mesh, tmp_path: Path) -> None:
    flag = tmp_path / "ended"

    def elements() -> Iterator[Any]:
        for number in range(6):
            if number == 3 and not flag.exists():
                flag.touch()
                os._exit(9)
            yield {"tokens": np.full((4, 3), number, np.int32), "number": np.int64(number)}

    stream = pw.stream(elements, LIKE, sharding=rows(mesh))
    assert [int(batch["number"]) for batch in stream] == list(range(6))
    assert flag.exists()


def test_a_checkpoint_has_its_position(mesh: pw.Mesh, tmp_path: Path) -> None:
    stream = pw.stream(counting(6), LIKE, sharding=rows(mesh))
    total = next(stream)["tokens"]
    for _ in range(2):
        total = pw.jit(lambda x, y: x + y, mesh=mesh)(total, next(stream)["tokens"])
    tree = {"total": total, "stream": stream}
    pw.checkpoint(tree, path=tmp_path / "saved").result()
    pw.checkpoint(tree).result()
    assert int(next(stream)["number"]) == 3
    back = pw.restore(tmp_path / "saved", tree)
    assert [int(batch["number"]) for batch in back["stream"]] == [3, 4, 5]
    np.testing.assert_array_equal(np.asarray(back["total"]), np.full((4, 3), 3))
    assert [int(batch["number"]) for batch in stream] == [4, 5]
    assert back["stream"].position == 6


# --- generators with a state -----------------------------------------------------------------------


class Numbers:
    """Counts how many elements it made; its state is its position."""

    def __init__(self, count: int, made: list[int], names: tuple[str, str]) -> None:
        self._number, self._count, self._made = 0, count, made
        setattr(self, names[0], lambda: {"number": self._number})
        setattr(self, names[1], self._restore)

    def _restore(self, state: dict[str, int]) -> None:
        self._number = state["number"]

    def __iter__(self) -> Numbers:
        return self

    def __next__(self) -> np.ndarray:
        if self._number == self._count:
            raise StopIteration
        self._number += 1
        self._made.append(self._number - 1)
        return np.full(2, self._number - 1, np.int32)


SHARE = whole_share("numbers", [(2,)], ["int32"])
NAMES = [("get_state", "set_state"), ("state_dict", "load_state_dict"), ("state", "restore")]


@pytest.mark.parametrize("names", NAMES)
def test_a_feeder_continues_from_a_state_and_skips_only_what_is_left(
    names: tuple[str, str],
) -> None:
    made: list[int] = []

    def feeder() -> Feeder:
        return Feeder(lambda: Numbers(9, made, names), PlainTree(0), False, 64)

    first = feeder()
    notes = [first.element(SHARE, number)[1] for number in range(4)]
    made.clear()
    leaves, note = feeder().element(SHARE, 6, 4, notes[3])
    assert (leaves[0][0], made, pickle.loads(note.state or b"")) == (6, [4, 5, 6], {"number": 7})
    made.clear()
    of_other_part = notes[3]._replace(part=1, parts=2)
    assert feeder().element(SHARE, 6, 4, of_other_part)[0][0][0] == 6
    assert made == list(range(7)), "it is counted from the beginning"
    with pytest.raises(pw.ArgumentError, match=r"takes \d+ bytes, and there is room for 3"):
        Feeder(lambda: Numbers(9, made, names), PlainTree(0), False, 3).element(SHARE, 0)


@pytest.mark.parametrize("seed", range(20))
def test_a_feeder_makes_any_element_in_any_order(seed: int) -> None:
    random = np.random.default_rng(seed)
    made: list[int] = []
    feeder = Feeder(lambda: Numbers(7, made, NAMES[0]), PlainTree(0), False, 64)
    notes: dict[int, Note] = {}
    for _ in range(30):
        number = int(random.integers(9))
        base = int(random.choice([0, *[n for n in notes if n <= number]]))
        leaves, note = feeder.element(SHARE, number, base, notes.get(base))
        assert note.ended == (number >= 7)
        assert note.ended or leaves[0].tolist() == [number, number]
        assert note_of(note.row(64)) == note
        if not note.ended:
            notes[number + 1] = note


def test_positions_are_saved_with_the_states_that_fit() -> None:
    for size, rows_kept in ((4, True), (3000, True), (9000, False)):
        row = Note(False, b"s" * size, 0, 1).row(size)
        saved = Position(12, np.stack([row, row])).saved()
        assert saved.shape == (SAVED_BYTES,)
        back = Position.of(saved)
        assert back.number == 12
        assert (back.rows is not None) == rows_kept
        assert not rows_kept or np.array_equal(back.rows, [row, row])  # type: ignore[arg-type]
    assert Position.of(Position(3).saved()) == Position(3)
    with pytest.raises(pw.ArgumentError, match="no position of a stream"):
        Position.of(np.zeros(3))


def test_a_stream_goes_on_from_a_state(mesh: pw.Mesh, tmp_path: Path) -> None:
    log = tmp_path / "made"

    class Logged:
        def __init__(self) -> None:
            self.number = 0

        def get_state(self) -> int:
            return self.number

        def set_state(self, number: int) -> None:
            self.number = number

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> np.ndarray:
            with log.open("a") as file:
                file.write(f"{self.number} ")
            self.number += 1
            return np.full(2, self.number - 1, np.int32)

    like = jax.ShapeDtypeStruct((2,), jnp.int32)
    stream = pw.stream(Logged, like, devices=mesh.devices, prefetch=1)
    for _ in range(50):
        last = next(stream)
    assert int(last[0]) == 49
    pw.checkpoint({"x": last, "stream": stream}, path=tmp_path / "saved").result()
    stream.close()
    log.write_text("")
    back = pw.restore(tmp_path / "saved", {"x": last, "stream": stream})["stream"]
    assert [int(next(back)[0]) for _ in range(3)] == [50, 51, 52]
    assert log.read_text().split()[:3] == ["50", "51", "52"], "nothing is skipped"


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="grain is not in the environment there")
def test_an_iterator_of_grain_goes_on_from_a_checkpoint(mesh: pw.Mesh, tmp_path: Path) -> None:
    def batches(part: pw.Part) -> Any:
        import grain

        rows = grain.MapDataset.range(40).seed(7).shuffle().repeat()
        drawn = rows.random_map(lambda row, draw: np.array([row, draw.random()], np.float32))
        return iter(drawn[part.index :: part.count].batch(2).to_iter_dataset())

    like = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    stream = pw.stream(batches, like, devices=mesh.devices)
    for _ in range(13):
        last = next(stream)
    pw.checkpoint({"x": last, "stream": stream}, path=tmp_path / "saved").result()
    expected = [np.asarray(next(stream)) for _ in range(12)]  # the second epoch begins here
    stream.close()
    back = pw.restore(tmp_path / "saved", {"x": last, "stream": stream})["stream"]
    assert Position.of(*jax.tree.leaves(back)).rows is not None, (
        "it has the iterator's own state, and skips nothing"
    )
    np.testing.assert_array_equal([np.asarray(next(back)) for _ in range(12)], expected)
    assert len(np.unique(np.stack(expected)[:, :, 1])) == 24, "the elements are random"


# --- on real processes -----------------------------------------------------------------------------


def parts(*, part: Any) -> Iterator[Any]:
    """Random rows of this part; each host draws those of all, so that rows do not depend on the hosts."""
    import numpy

    draw = numpy.random.default_rng(5)
    while True:
        yield draw.random((8, 64), numpy.float32)[part.slices]


def trained(mesh: pw.Mesh, steps: int, disturb: Callable[[int], object]) -> np.ndarray:
    """The weights after so many steps on the stream."""
    like = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    stream = pw.stream(parts, like, sharding=pw.NamedSharding(mesh, P("x")))
    step = pw.jit(
        lambda w, x: w + jnp.tanh(x @ w).mean(0) * 0.1,
        mesh=mesh,
        in_shardings=(P(), P("x")),
        out_shardings=P(),
        donate_argnums=0,
    )
    w = pw.put(np.eye(64, dtype=np.float32), sharding=pw.NamedSharding(mesh, P()))
    for number in range(steps):
        w = step(w, next(stream))
        if number == steps // 3:
            pw.checkpoint(w).result(60)
        disturb(number)
    return np.asarray(w)


@pytest.mark.long
@pytest.mark.processes
def test_a_host_killed_in_the_middle_of_a_stream_changes_nothing() -> None:
    with pw.LocalCluster(hosts_per_island=2, devices_per_host=1, allow_python=True) as cluster:
        mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2).devices, ("x",))
        calm = trained(mesh, 12, lambda number: None)

        def disturb(number: int) -> None:
            if number in (2, 7):  # before the checkpoint, and after it
                os.kill(cluster.hosts[number == 7].runtime_pid(), signal.SIGKILL)

        np.testing.assert_array_equal(trained(mesh, 12, disturb), calm)


@pytest.mark.processes
def test_where_hosts_run_no_python_the_client_makes_the_elements() -> None:
    with pw.LocalCluster(devices_per_host=2):
        mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2).devices, ("x",))
        stream = pw.stream(counting(3), LIKE, sharding=rows(mesh))
        assert [int(batch["number"]) for batch in stream] == [0, 1, 2]
        assert stream.where == "client"
        with pytest.raises(pw.PythonRefused, match="--allow-python"):
            next(pw.stream(counting(3), LIKE, sharding=rows(mesh), where="hosts"))
