"""`pw.cond` against `jax.lax.cond`: values, places, errors, and that the other branch does not run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.client.programs.writing.branch import Branch
from pw.client.programs.writing.builder import ProgramBuilder
from pw.core.programs.guards import merge
from pw.core.programs.lower import lower
from pw.core.programs.program import Node, Output, Program, ValueRef
from pw.core.programs.program_checks import check_program
from pw.core.sharding import ArraySpec, Binding, DeviceAddress, Placement, Sharding
from pw.devices.host.backend import Build, Op
from pw.devices.jax.backend import JaxBackend
from pw.testing import InProcessCluster
from tests.stages.inside import type_of
from tests.stages.scripts import TWO_GANGS, two_clients_say_ok, two_gangs

ONES = np.ones(4, np.float32)


class Place:
    """Slices of two islands, and functions on them."""

    def __init__(self) -> None:
        slices = pw.make_virtual_device_set()
        self.here = pw.Mesh(slices.add_slice(2, island="island-0").devices, ("x",))
        self.there = pw.Mesh(slices.add_slice(2, island="island-1").devices, ("x",))
        self.double = pw.jit(lambda x: x * 2, mesh=self.here)
        self.add = pw.jit(lambda x: x + 100, mesh=self.there)
        self.is_large = pw.jit(lambda x: x.sum() > 10, mesh=self.here)
        self.is_huge = pw.jit(lambda x: x.sum() > 1000, mesh=self.there)
        self.nans = pw.jit(lambda x: jnp.log(-jnp.abs(x) - 1), mesh=self.here, check_nans=True)
        self.plain = SimpleNamespace(
            **{name: fun.__wrapped__ for name, fun in vars(self).items() if hasattr(fun, "lower")}
        )
        """The same functions for JAX alone."""


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with InProcessCluster(islands=2, devices_per_island=2):
        yield Place()


def _twice(place: Any, x: Any) -> Any:
    return place.add(place.double(place.add(x)))


def _nested(place: Any, cond: Callable[..., Any], x: Any) -> Any:
    def large(x: Any) -> Any:
        return cond(place.is_huge(place.double(x)), place.add, place.double, x)

    def small(x: Any) -> Any:
        return cond(place.is_large(place.add(x)), lambda x: x, place.add, x)

    return cond(place.is_large(x), large, small, x)


def _from_outside(place: Any, cond: Callable[..., Any], x: Any) -> Any:
    huge = place.is_huge(x)

    def large(x: Any) -> Any:
        return cond(huge, place.add, place.double, x)

    return cond(place.is_large(x), large, lambda x: cond(huge, place.double, place.add, x), x)


def _behind(place: Any, cond: Callable[..., Any], x: Any) -> Any:
    y = cond(place.is_large(x), place.double, place.add, x)
    z, w = cond(place.is_huge(y), lambda y: (y, place.add(y)), lambda y: (place.double(y), y), y)
    return place.double(z), place.add(w)


CASES: dict[str, Callable[[Any, Callable[..., Any], Any], Any]] = {
    "one slice": lambda p, cond, x: cond(
        p.is_large(x), p.double, lambda x: p.double(p.double(x)), x
    ),
    "two islands": lambda p, cond, x: cond(p.is_large(x), p.double, lambda x: _twice(p, x), x),
    "predicate elsewhere": lambda p, cond, x: cond(p.is_huge(x), p.double, p.double, x),
    "operand unchanged": lambda p, cond, x: cond(p.is_large(x), lambda x: x, p.add, x),
    "constants": lambda p, cond, x: cond(
        p.is_large(x), lambda x: (p.double(x), 1), lambda x: (x, 2), x
    ),
    "only constants": lambda p, cond, x: cond(p.is_large(x), lambda: ONES, lambda: ONES * 3),
    "nothing": lambda p, cond, x: cond(p.is_large(x), lambda x: None, lambda x: None, x),
    "operators": lambda p, cond, x: cond(
        p.is_large(x), lambda x: x + 1, lambda x: x[::-1], p.double(x)
    ),
    "nested": _nested,
    "from outside": _from_outside,
    "one behind another": _behind,
}


@pytest.mark.parametrize("size", [1.0, 3.0, 600.0])
@pytest.mark.parametrize("name", CASES)
def test_it_gives_what_jax_gives(place: Place, name: str, size: float) -> None:
    case, x = CASES[name], ONES * np.float32(size) + np.arange(4, dtype=np.float32)
    made = pw.get(pw.program(lambda x: case(place, pw.cond, x))(x))
    wanted = jax.jit(lambda x: case(place.plain, jax.lax.cond, x))(x)
    jax.tree.map(np.testing.assert_array_equal, made, wanted)
    inside = pw.jit(lambda x: case(place, pw.cond, x), mesh=place.here)(x)
    jax.tree.map(np.testing.assert_array_equal, pw.get(inside), wanted)


@pytest.mark.parametrize(("size", "made"), [(1.0, 0), (600.0, 1)])
def test_what_a_branch_is_sent_is_made_only_if_it_is_taken(
    place: Place, size: float, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    @pw.program
    def f(x: Any) -> Any:
        x = place.double(x)
        return pw.cond(place.is_large(x), lambda x: place.double(place.add(x)), place.double, x)

    x = pw.put(ONES * np.float32(size), sharding=pw.NamedSharding(place.here, P()))
    pw.get(f(x))
    builds: list[Build] = []
    submit = JaxBackend.submit

    def watched(self: JaxBackend, ops: Sequence[Op]) -> None:
        builds.extend(op for op in ops if isinstance(op, Build))
        submit(self, ops)

    monkeypatch.setattr(JaxBackend, "submit", watched)
    pw.get(f(x))
    there = [op for op in builds if op.devices[0].host == "host-1"]
    assert len(there) == made, "neither the predicate nor the operand of a branch that is not taken"


def test_results_lie_where_the_true_branch_leaves_them_or_as_asked(place: Place) -> None:
    there = pw.NamedSharding(place.there, P("x"))
    x = pw.put(ONES, sharding=pw.NamedSharding(place.here, P("x")))
    assert pw.cond(False, place.add, place.double, x).sharding.mesh == place.there
    assert pw.cond(True, place.double, place.add, x).sharding.mesh == place.here
    made = pw.cond(True, place.double, place.add, x, out_shardings=there)
    assert made.sharding == there
    assert pw.get(made).tolist() == [2.0] * 4
    made = pw.cond(False, place.double, place.add, x, out_shardings=P("x"))
    assert made.sharding == pw.NamedSharding(place.here, P("x"))
    assert pw.get(made).tolist() == [101.0] * 4


def test_functions_without_devices_run_where_the_operands_lie(place: Place) -> None:
    double, triple = pw.jit(lambda x: x * 2), pw.jit(lambda x: x * 3)
    x = pw.put(ONES, sharding=pw.NamedSharding(place.there, P("x")))
    for run in (pw.cond, pw.program(lambda p, x: pw.cond(p, double, triple, x))):
        args = (True, double, triple, x) if run is pw.cond else (True, x)
        made = run(*args)
        assert made.sharding.mesh == place.there
        assert pw.get(made).tolist() == [2.0] * 4


def test_alone_it_is_a_program_that_is_kept(place: Place) -> None:
    traced = []

    def true(x: Any) -> Any:
        traced.append(1)
        return place.double(x)

    for predicate in (True, np.bool_(False), pw.put(True), np.asarray(True)):
        made = pw.cond(predicate, true, place.add, ONES)
        assert pw.get(made).tolist() == ([2.0] if np.asarray(predicate) else [101.0]) * 4
    assert len(traced) == 3  # a Python boolean, an array of numpy, and one of pw


def test_the_other_branch_does_not_run(place: Place, tmp_path: Path) -> None:
    shape = jax.ShapeDtypeStruct((4,), np.float32)

    def noting(name: str) -> Any:
        def note(x: Any) -> Any:
            (tmp_path / name).touch()
            return x

        return pw.host_function(note, shape, mesh=place.there)

    made = pw.cond(place.is_large(ONES), noting("true"), noting("false"), ONES)
    assert pw.get(made).tolist() == ONES.tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["false"]


def test_why_names_the_computation_of_a_predicate(place: Place, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def asks_somebody() -> Any:
        return np.bool_(fifo.read_text() == "yes")

    slow = pw.host_function(asks_somebody, jax.ShapeDtypeStruct((), np.bool_), mesh=place.here)
    chosen = pw.program(lambda x: pw.cond(slow(), place.double, place.add, x))(ONES)
    try:
        told = next((w for w in (pw.why() for _ in range(500)) if "the end of" in w), "")
        assert "asks_somebody" in told
    finally:
        fifo.write_text("yes")
    assert pw.get(chosen).tolist() == [2.0] * 4


def test_only_errors_of_the_taken_branch_and_of_the_predicate_matter(place: Place) -> None:
    fails, works = place.nans, place.add
    assert pw.get(pw.cond(False, fails, works, ONES)).tolist() == [101.0] * 4
    with pytest.raises(pw.NaNFound, match="made NaNs"):
        pw.get(pw.cond(True, fails, works, ONES))
    with pytest.raises(pw.NaNFound, match="made NaNs"):
        pw.get(pw.cond(place.is_large(fails(ONES)), works, works, ONES))

    @pw.program
    def inner(x: Any) -> Any:
        def true(x: Any) -> Any:
            return pw.cond(place.is_large(fails(x)), works, works, x)

        return pw.cond(place.is_large(x), true, works, x), place.double(x)

    assert [each.tolist() for each in pw.get(inner(ONES))] == [[101.0] * 4, [2.0] * 4]
    poisoned, sound = inner(ONES * 9)
    assert pw.get(sound).tolist() == [18.0] * 4
    with pytest.raises(pw.NaNFound, match="made NaNs"):
        pw.get(poisoned)


def test_both_branches_may_donate_the_same_array(place: Place) -> None:
    step = pw.jit(lambda x: x + 1, mesh=place.here, donate_argnums=0)
    undo = pw.jit(lambda x: x - 1, mesh=place.here, donate_argnums=0)
    train = pw.program(lambda up, x: pw.cond(up, step, undo, x))
    x = pw.put(ONES, sharding=pw.NamedSharding(place.here, P()))
    for up in (True, True, False, True):
        x, before = train(up, x), x
        with pytest.raises(pw.ArrayDeleted):
            pw.get(before)
    assert pw.get(x).tolist() == [3.0] * 4
    keep = pw.program(lambda up, x: pw.cond(up, step, lambda x: x, x))
    assert pw.get(keep(False, x)).tolist() == [3.0] * 4


def test_iterations_behind_the_last_one_are_skipped(place: Place) -> None:
    """As a loop uses it: each iteration makes the predicate of the next one, on another island."""
    grow = pw.jit(lambda x: (x * 2, x.sum() * 2 < 100), mesh=place.there)

    builder: Any = ProgramBuilder("loop")

    def call(function: Any, x: Any) -> Any:
        like = jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype, sharding=x.sharding)
        return builder.call(function.lower(like)._traced, [x])

    def loop(x: Any) -> Any:
        (more,), (made,) = call(place.is_large, x), call(place.double, x)
        for _ in range(12):
            branches = (Branch("grow", more, False, None), Branch("stay", more, True, None))
            with builder.within(branches[0]):
                grown, following = call(grow, made)
                pair = (
                    builder.place(grown, type_of(grown), "loop"),
                    builder.place(made, type_of(made), "loop"),
                )
                types = [type_of(grown)]
            if type_of(made) is not type_of(grown):
                made = builder.reshard(made, grown.sharding)
                pair = (pair[0], builder.place(made, type_of(made), "loop"))
            (made,) = builder.merge("loop", branches, [pair], types)
            more = following
        return made

    launch = builder.finish([loop(builder.leaf(0, jax.core.ShapedArray(ONES.shape, ONES.dtype)))])
    for start in (1.0, 3.0, 10.0):
        wanted = ONES * np.float32(start)
        more, wanted = wanted.sum() > 10, wanted * 2
        while more:
            wanted, more = wanted * 2, wanted.sum() * 2 < 100
        np.testing.assert_array_equal(pw.get(launch([ONES * np.float32(start)])[0]), wanted)


def _kept(place: Place, x: Any) -> Any:
    kept = []
    pw.cond(place.is_large(x), lambda x: kept.append(place.double(x)), lambda x: None, x)
    return place.double(kept[0])


def _unequal(place: Place, x: Any) -> Any:
    def one(x: Any) -> Any:
        return {"a": x, "b": (x, place.add(x))}

    def other(x: Any) -> Any:
        return {"a": x, "b": (x, x[:2])}

    return pw.cond(place.is_large(x), one, other, x)


def _trees(place: Place, x: Any) -> Any:
    def pair(x: Any) -> Any:
        return x, x

    return pw.cond(place.is_large(x), place.double, pair, x)


WRONG: dict[str, tuple[type[Exception], str, Callable[[Place, Any], Any]]] = {
    "no boolean": (
        pw.ArgumentError,
        r"pw.cond takes a scalar boolean .* given float32\[\]",
        lambda p, x: pw.cond(x.sum(), p.double, p.add, x),
    ),
    "no scalar": (
        pw.ArgumentError,
        r"given bool\[4\]; make one of all, as in x.any\(\)",
        lambda p, x: pw.cond(x > 0, p.double, p.add, x),
    ),
    "no function": (TypeError, "two functions", lambda p, x: pw.cond(p.is_large(x), p.double, x)),
    "unequal leaves": (
        pw.ArgumentError,
        r"result\['b'\]\[1\] is float32\[4\] from the true branch 'one', and float32\[2\] from the false "
        "branch 'other'; convert",
        _unequal,
    ),
    "unequal trees": (
        pw.ArgumentError,
        r"must return the same tree: .* false branch 'pair' returns \(float32\[4\], float32\[4\]\)",
        _trees,
    ),
    "no array": (
        pw.ArgumentError,
        "the true branch of a pw.cond, returns 'x' of type str",
        lambda p, x: pw.cond(p.is_large(x), lambda: "x", lambda: "x"),
    ),
    "a list": (
        pw.ArgumentError,
        r"takes a scalar boolean as its predicate, and was given \[bool\[\]\]; compute one",
        lambda p, x: pw.cond([p.is_large(x)], p.double, p.add, x),
    ),
    "a word": (
        pw.ArgumentError,
        "takes a scalar boolean as its predicate, and was given 'yes'; compute one",
        lambda p, x: pw.cond("yes", p.double, p.add, x),
    ),
    "kept": (pw.TracerError, "a branch of a pw.cond, has made; .*Return it from both", _kept),
    "if": (pw.TracerError, "with pw.cond", lambda p, x: x if p.is_large(x) else p.add(x)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_while_tracing(place: Place, name: str) -> None:
    kind, words, wrong = WRONG[name]
    with pytest.raises(kind, match=words):
        pw.program(lambda x: wrong(place, x))(ONES)


@pytest.mark.parametrize("given", [[True], None, "yes", {"a": np.True_}])
def test_a_predicate_that_is_no_array_is_refused_alone(place: Place, given: Any) -> None:
    words = "pw.cond takes a scalar boolean as its predicate, and was given "
    with pytest.raises(pw.ArgumentError, match=re.escape(f"{words}{given!r}")):
        pw.cond(given, place.double, place.add, ONES)


def test_a_jit_function_has_no_place_for_results(place: Place) -> None:
    where = pw.NamedSharding(place.here, P())

    def inside(x: Any) -> Any:
        return pw.cond(x.sum() > 0, jnp.sin, jnp.cos, x, out_shardings=where)

    with pytest.raises(pw.ArgumentError, match="takes no out_shardings there"):
        pw.jit(inside, mesh=place.here)(ONES)


def test_merges_that_do_not_fit_are_refused() -> None:
    """A client of another version might send one."""
    placement = Placement(1, (0,))
    spec = ArraySpec((4,), "float32", Sharding(("x",), (1,)), placement)
    binding = {1: Binding.of(1, "island", (DeviceAddress("host", 0),))}
    good = merge("choice", [spec])

    def choice(inputs: tuple[ArraySpec, ...]) -> Program:
        one = type(good)("choice", b"", placement, inputs, (spec,), kind=good.kind)
        nodes = (Node(0, tuple(ValueRef(-1, at) for at in range(len(inputs)))),)
        return Program("p", (one,), nodes, inputs, (Output(ValueRef(0, 0), spec),))

    check_program(choice(good.inputs))
    assert lower(choice(good.inputs), binding).hosts
    for bad in ((), good.inputs[:2], (spec, spec, spec), (*good.inputs[:2], good.inputs[0])):
        with pytest.raises(pw.ShardingError, match="takes a boolean and two values"):
            check_program(choice(bad))


GANGS = f"""{TWO_GANGS}
odd = pw.jit(lambda x: jnp.sum(x) % 3 == 1, mesh=there, in_shardings=P("x"))
more = pw.jit(lambda x: jnp.sum(x) % 5 < 3, mesh=here, in_shardings=P("x"))

@pw.program
def walk(x):
    def one(x):
        return pw.cond(more(x), lambda x: on_second(on_first(x)), on_first, x)
    return on_first(pw.cond(odd(x), one, on_second, x, out_shardings=pw.NamedSharding(here, P("x"))))

wanted = np.arange(4, dtype=np.uint32)
x = pw.put(wanted, sharding=pw.NamedSharding(here, P("x")))
taken = set()
for _ in range(60):
    x = walk(x)
    total = int(wanted.sum(dtype=np.uint32))
    branch = (total % 3 == 1, total % 5 < 3)
    taken.add(branch)
    wanted = after(wanted, 3 if branch == (True, True) else 2)
np.testing.assert_array_equal(np.asarray(x), wanted)
assert len(taken) == 4, taken
print("ok")
"""


@pytest.mark.processes
@pytest.mark.long
def test_gangs_of_two_islands_skip_alike() -> None:
    with two_gangs() as cluster:
        two_clients_say_ok(cluster.address, GANGS)
