"""What XLA divides, and which devices then hold equal values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pw.islands import division
from pw.islands.assignment import Assignment
from pw.islands.cut import cut
from pw.islands.division import Divisions, divide
from pw.islands.errors import CannotCut
from pw.islands.flat import entry, flatten, returned
from pw.islands.groups import aligned
from pw.islands.labels import LabelsOf, labels_of
from pw.islands.plan import Lies
from pw.islands.writing import Sides

DEVICES = 8


def lowered(function: Any, *specs: P) -> Any:
    """The module of a function of arrays of 16 x 8 over a mesh of 2 x 4."""
    mesh = Mesh(np.reshape(jax.devices(), (2, 4)), ("island", "data"))
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    likes = [jax.ShapeDtypeStruct((16, 8), np.float32)] * len(specs)
    return jax.jit(function, in_shardings=shardings).lower(*likes).compiler_ir("stablehlo")


def test_a_division_is_kept_for_the_next_run(tmp_path: Path) -> None:
    module = lowered(lambda x: jnp.cumsum(x, 0), P(("island", "data")))
    with module.context:
        first = divide(module, DEVICES, files=Divisions(tmp_path))
        files = Divisions(tmp_path)
        again = divide(module, DEVICES, files=files)
        assert files.loaded == 1
        assert str(again.module) == str(first.module)
        assert again.arguments == first.arguments == ("{devices=[8,1]<=[8]}",)
        divide(lowered(lambda x: jnp.cumsum(x, 1), P("data")), DEVICES, files=files)
        assert files.loaded == 1


def test_xla_says_why_it_does_not_divide() -> None:
    with mlir.make_ir_context():
        module = mlir.ir.Module.parse(
            "func.func public @main(%x: tensor<7xf32> "
            '{mhlo.sharding = "{devices=[2]<=[2]}"}) -> tensor<7xf32> { return %x : tensor<7xf32> }'
        )
        with pytest.raises(CannotCut, match="XLA does not divide it"):
            divide(module, DEVICES)


def test_devices_with_equal_values() -> None:
    def function(x: Any, w: Any) -> Any:
        total = jax.lax.with_sharding_constraint(x.sum(0), P())
        _, w = jax.lax.optimization_barrier((x, w))
        return x @ w.T, total, w * 2

    mesh = Mesh(np.reshape(jax.devices(), (2, 4)), ("island", "data"))
    with jax.sharding.set_mesh(mesh):
        module = lowered(function, P(("island", "data")), P("data"))
    with module.context:
        divided = divide(module, DEVICES)
        block = entry(flatten(divided.module))
        given = [labels_of(one, DEVICES) for one in divided.arguments]
        labels = LabelsOf(block, given, DEVICES)
        found = [labels[value] for value in returned(block)]
    assert given == [(0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 2, 3, 0, 1, 2, 3)]
    assert found[1] == (0,) * DEVICES
    assert found[2] == given[1]


def test_groups_that_lie_the_same_way_on_all_islands() -> None:
    halves = Assignment([0, 0, 0, 0, 1, 1, 1, 1])
    pairs = aligned(((0, 4), (1, 5), (2, 6), (3, 7)), halves)
    assert pairs is not None
    assert (pairs.width, pairs.spread) == (1, 2)
    whole = aligned((tuple(range(8)),), halves)
    assert whole is not None
    assert (whole.width, whole.spread, whole.inner[1]) == (4, 2, ((0, 1, 2, 3),))
    turns = Assignment([0, 1, 0, 1, 0, 1, 0, 1])
    other = aligned((tuple(range(8)),), turns)
    assert other is not None
    assert other.order[0][:3] == ((0, 0), (1, 0), (0, 1))
    assert aligned(((0, 5), (1, 4), (2, 6), (3, 7)), halves) is None


def test_an_error_names_the_line_of_its_own_script(tmp_path: Path, monkeypatch: Any) -> None:
    """Another script has had the same function divided: what is kept has the lines of that one."""
    monkeypatch.setattr(division, "kept_divisions", lambda: Divisions(tmp_path))

    def of(lines: int) -> CannotCut:
        source = "\n" * lines + (
            "def function(x):\n"
            "    def branch(x):\n"
            "        step = lambda at, x: jax.debug.print('{}', x[0, 0]) or x - x.mean()\n"
            "        return jax.lax.fori_loop(0, 3, step, x)\n"
            "    return jax.lax.cond(x.sum() > 0, branch, lambda x: x, x)\n"
        )
        file = tmp_path / "script.py"
        file.write_text(source)
        names: dict[str, Any] = {"jax": jax}
        exec(compile(source, str(file), "exec"), names)
        module = lowered(names["function"], P(("island", "data")))
        assignment = Assignment([0, 0, 0, 0, 1, 1, 1, 1])
        with module.context, module.operation.location, pytest.raises(CannotCut) as caught:
            cut(module, assignment, sides, "function")
        return caught.value

    def sides(divided: Any) -> Sides:
        lies = (Lies((8, 8), np.dtype(np.float32), (("x",),)),) * 2
        return Sides(({"x": 4}, {"x": 4}), (lies,), (lies,))

    assert [of(lines).where for lines in (0, 10, 10)] == [
        " (script.py:3)",
        " (script.py:13)",
        " (script.py:13)",
    ]
