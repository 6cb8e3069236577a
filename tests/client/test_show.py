"""What `pw.show` draws, what notebooks show, and that neither asks nor waits."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.client.connection import current
from pw.client.display.graph import LEVELS
from pw.client.display.grid import COLUMNS, ROWS, of_shards, ranges
from pw.client.looking.show import html
from pw.core.sharding import Sharding
from pw.testing import InProcessCluster
from tests.stages.stage import held, mesh_on, numbers, split


def drawn(what: Any, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    pw.show(what)
    return capsys.readouterr().out.splitlines()


def cells(lines: list[str]) -> list[list[str]]:
    """The text of each cell of a grid."""
    return [re.split(r" *│ *", line.strip("│ ")) for line in lines if "│" in line]


def grid_of(shape: tuple[int, ...], spec: Any, sizes: tuple[int, ...]) -> list[list[str]]:
    names = tuple("xyz"[: len(sizes)])
    devices = [("east", number) for number in range(int(np.prod(sizes)))]
    axes = tuple((entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec)
    grid = of_shards("", Sharding(names, sizes, axes), shape, devices)
    return [[cell.text for cell in row] for row in grid.rows]


@pytest.mark.parametrize(
    ("shape", "spec", "expected"),
    [
        ((8,), ("x",), [["0–1", "2–3"]]),
        ((8, 4), ("x",), [["0–1"], ["2–3"]]),
        ((8, 4), (None, "x"), [["0–1", "2–3"]]),
        ((8, 4), ("y", "x"), [["0", "2"], ["1", "3"]]),
        ((8, 4), (("x", "y"),), [["0"], ["1"], ["2"], ["3"]]),
        ((3, 8, 4), (None, "y", "x"), [["0", "2"], ["1", "3"]]),
        ((8, 4), (None, "y"), [["0, 2", "1, 3"]]),
        ((8, 4), (), [["0–3"]]),
        ((), (), [["0–3"]]),
        ((0, 4), ("x",), [["0–3"], [""]]),
    ],
)
def test_a_cell_is_a_shard_and_names_its_devices(
    shape: tuple[int, ...], spec: Any, expected: list[list[str]]
) -> None:
    assert grid_of(shape, spec, (2, 2)) == expected


def test_the_drawing_is_that_of_jax_for_the_same_sharding() -> None:
    """Each device has the box that its cell stands for."""
    sharding = Sharding(("x", "y"), (4, 2), (("y",), ("x",)))
    rows = grid_of((8, 8), ("y", "x"), (4, 2))
    for row, line in enumerate(rows):
        for column, text in enumerate(line):
            box = ((row * 4, row * 4 + 4), (column * 2, column * 2 + 2))
            assert sharding.box((8, 8), int(text)) == box


def test_neighbours_are_a_range() -> None:
    assert ranges([0, 1, 2, 3, 8, 10, 11]) == "0–3, 8, 10–11"
    assert ranges([]) == ""


def test_a_large_grid_is_drawn_in_part() -> None:
    devices = [("east", number) for number in range(1024)]
    grid = of_shards("", Sharding(("x", "y"), (32, 32), (("x",), ("y",))), (32, 32), devices)
    lines = cells(repr(grid).splitlines())
    assert len(lines) == ROWS + 1
    assert lines[0][-1] == f"… {32 - COLUMNS} more"
    assert lines[-1][0] == f"… {32 - ROWS} more rows"
    assert grid._repr_html_().count("<td") == ROWS * (COLUMNS + 1) + 1


def test_an_array_draws_its_shards_before_its_value_exists(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with InProcessCluster(devices_per_island=4) as cluster:
        mesh = mesh_on(0, devices=4)
        f = pw.jit(lambda x: x + 1, mesh=mesh)
        x = pw.put(numbers(8), sharding=split(mesh))
        f(x).block_until_ready()
        with held(cluster):
            y = f(x)
            for question in ("fetch", "wait"):
                monkeypatch.setattr(current.runtime(), question, lambda *_: pytest.fail("it asks"))
            lines = drawn(y, capsys)
            monkeypatch.undo()
        assert lines[0].startswith("float32[8] as P('x',): 4 shards of shape (2,); on 4 devices of")
        assert cells(lines) == [["0", "1", "2", "3"]]
        y.block_until_ready()
        assert "border-collapse" in y._repr_html_()
        assert "more" not in pw.put(1.0)._repr_html_()
        assert y._repr_html_().count("text-align:center") == 4
        assert repr(x) == "array([0., 1., 2., 3., 4., 5., 6., 7.], dtype=float32)"


def test_a_mesh_and_a_sharding_show_their_islands(capsys: pytest.CaptureFixture[str]) -> None:
    with InProcessCluster(islands=2, devices_per_island=4):
        both = pw.make_virtual_device_set().add_slice(devices=4, islands=2)
        mesh = pw.Mesh(np.array(both.devices, dtype=object).reshape(2, 2), ("island", "x"))
        lines = drawn(mesh, capsys)
        assert lines[0].startswith("Mesh(island=2, x=2) on 4 devices of islands ")
        assert cells(lines) == [["0", "1"], ["0", "1"]]
        names = [one.island for one in both.parts]
        assert lines[-1] == f"■ {names[0]}  ■ {names[1]}"
        assert (html(mesh) or "").count(names[1]) == 2
        assert html(jax.sharding.Mesh(jax.devices("cpu")[:1], ("x",))) is None
        sharding = pw.NamedSharding(mesh, P("island"))
        assert cells(drawn(sharding, capsys)) == [[f"{names[0]}: 0–1", f"{names[1]}: 0–1"]]
        y = pw.put(np.zeros((4, 2), np.float32), sharding=pw.NamedSharding(mesh, P("island", "x")))
        assert cells(drawn(y, capsys)) == [[f"{name}: {at}" for at in (0, 1)] for name in names]


def test_a_program_shows_its_calls_by_slice_and_what_moves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def double(x: Any) -> Any:
        return x * 2

    def add(x: Any, y: Any) -> Any:
        return x + y

    with InProcessCluster(islands=2, devices_per_island=2):
        east, west = mesh_on(0), mesh_on(1)
        on_east, on_west = pw.jit(double, mesh=east), pw.jit(add, mesh=west)

        @pw.program
        def step(x: Any) -> Any:
            return on_west(on_east(on_east(x)), on_east(x * 1))

        with pytest.raises(pw.ArgumentError, match="call it once"):
            pw.show(step)
        assert "not called yet" in step._repr_html_()
        step(np.ones(4, np.float32))
        lines = drawn(step, capsys)
        assert re.match(
            r"program step: \d+ calls on 2 slices, 2 values move between them", lines[0]
        )
        text = "\n".join(lines)
        assert re.search(r"0 +double", text)
        assert re.search(r"2 +add", text)
        assert re.search(r"double → add +\S+ #0 +\S+ #1 +float32\[4\] +16 B +2", text), text
        html = step._repr_html_()
        assert html.count("#c0392b") == 2 * len(re.findall("<circle[^>]*c0392b", html)) > 0
        assert ">double<" in html
        assert drawn(step.lower(np.ones(4, np.float32)), capsys)[0] == lines[0]
        with pytest.raises(pw.ArgumentError, match="no graph to show"):
            pw.show(on_west)
        on_east(np.ones(4, np.float32))
        assert drawn(on_east, capsys)[0].startswith(
            "program double: 1 call on 1 slice, 0 values move"
        )


def test_a_long_program_is_drawn_in_part(capsys: pytest.CaptureFixture[str]) -> None:
    with InProcessCluster(devices_per_island=1):
        f = pw.jit(jax.numpy.sin, mesh=mesh_on(0, devices=1))

        @pw.program
        def many(x: Any) -> Any:
            for _ in range(LEVELS + 5):
                x = f(x)
            return x

        many(1.0)
        lines = drawn(many, capsys)
        assert any("… 5 more" in line for line in lines)
        assert "5 more levels" in many._repr_html_()
        assert many._repr_html_().count("<rect") == LEVELS


def test_other_things_cannot_be_shown() -> None:
    with pytest.raises(pw.ArgumentError, match="was given ndarray; it draws pw arrays"):
        pw.show(np.zeros(3))
