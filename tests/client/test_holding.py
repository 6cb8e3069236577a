"""Large operands of `pw.cond` leave their slice only if the branch is taken (`holding`)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.client.programs.writing import holding
from pw.client.programs.writing.holding import LEAST_BYTES
from pw.core.programs.guards import hold, predicate_spec
from pw.core.programs.lower import lower_with_memory
from pw.core.programs.program import Computation, Node, Output, Program, ValueRef
from pw.core.sharding import ArraySpec, Binding, DeviceAddress, Placement, Sharding
from pw.testing import InProcessCluster
from tests.client import test_cond as conds
from tests.client import test_gradients_of_data as gradients
from tests.stages.daemons import until
from tests.stages.samples import diagonal

ROWS = LEAST_BYTES // (4 * 64)
LARGE = np.linspace(0.5, 1, ROWS * 64, dtype=np.float32).reshape(ROWS, 64)
WHOLE = Sharding(("x",), (1,))
NO = LARGE.sum() * 2
"""A limit that operands are below, so that a predicate is false."""


FEW = pw.jit(lambda x: x[:: ROWS // 4, ::16])
"""Runs where its argument is; so a client does not get large results over the counted channel."""


class Place:
    """Slices of three islands, and functions on them."""

    def __init__(self, cluster: InProcessCluster) -> None:
        self.cluster = cluster
        slices = pw.make_virtual_device_set()
        self.here, self.there, self.far = (
            pw.Mesh(slices.add_slice(2, island=f"island-{n}").devices, ("x",)) for n in range(3)
        )
        self.double = pw.jit(lambda x: x * 2, mesh=self.here)
        self.add = pw.jit(lambda x: x + 100, mesh=self.there)
        self.mix = pw.jit(lambda x, y: x * 2 + y, mesh=self.there)
        self.square = pw.jit(lambda x: x * x, mesh=self.far)
        self.is_above = pw.jit(lambda x, limit: x.sum() > limit, mesh=self.here)
        self.is_above_far = pw.jit(lambda x, limit: x[0].sum() > limit, mesh=self.far)
        self.plain = SimpleNamespace(
            **{name: fun.__wrapped__ for name, fun in vars(self).items() if hasattr(fun, "lower")}
        )
        """The same functions for JAX alone."""

    def at(self, x: Any, spec: Any) -> pw.Array:
        """Put an array on the first slice."""
        return pw.put(x, sharding=pw.NamedSharding(self.here, spec))

    @contextmanager
    def sends(self, times: int) -> Iterator[None]:
        """In the block, hosts send an operand to each other so many times."""
        before = self._sent_bytes()
        yield
        until(lambda: self._sent_bytes() - before >= times * LARGE.nbytes, f"{times} are sent")
        assert self._sent_bytes() - before < (times + 0.1) * LARGE.nbytes

    def _sent_bytes(self) -> int:
        return sum(host.bulk.sent_bytes for host in self.cluster.hosts)


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with InProcessCluster(islands=3, devices_per_island=2) as cluster:
        yield Place(cluster)


def _result(p: Any, cond: Any, x: Any, limit: Any) -> Any:
    """An operand that a branch returns, where the other one leaves its result."""
    return cond(p.is_above(x, limit), p.add, lambda x: x, x)


def _both_need_it(p: Any, cond: Any, x: Any, limit: Any) -> Any:
    return cond(p.is_above(x, limit), p.add, lambda x: p.add(p.add(x)), x)


def _nested(p: Any, cond: Any, x: Any, limit: Any) -> Any:
    """Large operands of inner branches; of one of them, both inner branches need it there."""

    def outer(x: Any, y: Any) -> Any:
        inner = p.is_above_far(x, limit / 2)
        return cond(inner, lambda: p.double(p.mix(x, y)), lambda: p.double(p.add(y)))

    return cond(p.is_above(x, limit), outer, lambda x, y: p.double(x), x, p.double(x))


def _later_used(p: Any, cond: Any, x: Any, limit: Any) -> Any:
    y = p.double(x)
    made = cond(p.is_above(x, limit), lambda y: p.double(p.add(y)), p.double, y)
    return made, p.double(y)


def _late(p: Any, cond: Any, x: Any, limit: Any) -> Any:
    """The predicate is computed on a third slice, the operand is an argument."""
    return cond(p.is_above_far(x, limit / 100), lambda x: p.double(p.mix(x, x)), p.double, x)


CASES: dict[str, tuple[Callable[..., Any], int, int]] = {
    "one branch elsewhere": (
        lambda p, cond, x, limit: cond(
            p.is_above(x, limit), lambda x: p.double(p.add(x)), p.double, x
        ),
        0,
        2,
    ),
    "the other branch elsewhere": (
        lambda p, cond, x, limit: cond(
            p.is_above(x, limit), p.double, lambda x: p.double(p.add(x)), x
        ),
        2,
        0,
    ),
    "a result": (_result, 1, 1),
    "both need it": (_both_need_it, 1, 1),
    "nested": (_nested, 0, 4),
    "later used": (_later_used, 0, 2),
    "three slices": (_late, 1, 3),
}
"""Each: a function, and how many times the operand is sent if the predicate is false, and true."""


@pytest.mark.parametrize(("name", "spec"), diagonal([*CASES], [P(), P("x")]))
def test_only_the_taken_branch_is_sent_its_operands(place: Place, name: str, spec: Any) -> None:
    case, *times = CASES[name]
    program = pw.program(lambda x, limit: jax.tree.map(FEW, case(place, pw.cond, x, limit)))
    few = FEW.__wrapped__
    plain = jax.jit(lambda x, limit: jax.tree.map(few, case(place.plain, jax.lax.cond, x, limit)))
    x = place.at(LARGE, spec)
    for limit, often in zip((np.float32(NO), np.float32(1)), times, strict=True):
        with place.sends(often):
            made = pw.get(program(x, limit))
        jax.tree.map(np.testing.assert_allclose, made, plain(LARGE, limit))


@pytest.fixture
def all_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands of any size are held back."""
    monkeypatch.setattr(holding, "LEAST_BYTES", 1)


@pytest.mark.usefixtures("all_held")
@pytest.mark.parametrize(("name", "size"), diagonal([*conds.CASES], [1.0, 3.0, 600.0]))
def test_values_are_the_same_with_holds_everywhere(place: Place, name: str, size: float) -> None:
    conds.test_it_gives_what_jax_gives(conds.Place(), name, size)


@pytest.mark.usefixtures("all_held")
@pytest.mark.parametrize("case", [gradients.both_branches, gradients.nested])
def test_gradients_go_through_holds(place: Place, case: Any) -> None:
    def on_slice(fun: Any, at: int) -> Any:
        return pw.jit(fun, mesh=(place.here, place.there)[at])

    def plainly(fun: Any, at: int) -> Any:
        return fun

    ours = pw.program(pw.value_and_grad(case(on_slice, pw.cond), (0, 1, 2)))
    theirs = jax.value_and_grad(case(plainly, jax.lax.cond), (0, 1, 2))
    w = gradients.W
    for x in (gradients.X, -abs(gradients.X), abs(gradients.X)):
        given = [pw.put(one, sharding=pw.NamedSharding(place.here, P())) for one in (w, w + 1, x)]
        got, wanted = pw.get(ours(*given)), theirs(w, w + 1, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-4), got, wanted)


def test_a_hold_leaves_the_buffer_of_its_value_to_a_later_donation(place: Place) -> None:
    """The operand of a taken branch is donated when it has been sent: without a copy."""
    take_over = pw.jit(lambda y: y + 1, mesh=place.here, donate_argnums=0)

    @pw.program
    def step(x: Any, limit: Any) -> Any:
        y = place.double(x)
        made = pw.cond(place.is_above(x, limit), lambda y: place.add(y)[:2], lambda y: y[:2], y)
        return made, y

    def copies() -> int:
        return sum(own.get("donations_copied", 0) for own in pw.stats().values())

    x, found = place.at(LARGE, P()), []
    for _ in range(5):  # a copy is made while the operand is still being read
        made, y = step(x, np.float32(1))
        np.testing.assert_allclose(made, LARGE[:2] * 2 + 100)
        before = copies()
        np.testing.assert_allclose(take_over(y), LARGE * 2 + 1)
        found.append(copies() - before)
    assert min(found) == 0


def test_a_branch_on_the_same_devices_takes_over_no_operand(place: Place) -> None:
    """Two slices of the same devices: the operand needs no transfer, and a copy of it is donated."""
    slices = pw.make_virtual_device_set()
    same = pw.Mesh(slices.add_slice(2, island="island-0").devices, ("x",))
    spoil = pw.jit(lambda x: x * 0 - 1, mesh=same, donate_argnums=0)
    moved = pw.NamedSharding(same, P())

    @pw.program
    def step(x: Any, limit: Any) -> Any:
        y = place.double(x)

        def branch(x: Any, y: Any) -> Any:
            return spoil(pw.put(x, sharding=moved)), spoil(pw.put(y, sharding=moved))

        def other(x: Any, y: Any) -> Any:
            return place.double(x), place.double(y)

        made = pw.cond(place.is_above(x, limit), branch, other, x, y)
        return made, place.double(y)

    x = place.at(LARGE, P())
    for limit in (np.float32(NO), np.float32(1), np.float32(1)):
        made, later = pw.get(step(x, limit))
        for got, operand in zip(made, (LARGE, LARGE * 2), strict=True):
            np.testing.assert_allclose(got, operand * 0 - 1 if limit == 1 else operand * 2)
        np.testing.assert_allclose(later, LARGE * 4)
        np.testing.assert_array_equal(pw.get(x), LARGE)


def test_loops_send_their_carry_ahead_of_the_predicate(place: Place) -> None:
    is_small = pw.jit(lambda x: x.sum() < 1e9, mesh=place.here)

    def body(x: Any) -> Any:
        return place.double(place.add(x))

    @pw.program
    def loop(x: Any) -> Any:
        return FEW(pw.while_loop(is_small, body, x, max_iterations=3))

    few = loop(place.at(LARGE, P()))
    wanted = LARGE
    for _ in range(3):
        wanted = (wanted + 100) * 2
    np.testing.assert_allclose(few, wanted[:: ROWS // 4, ::16], rtol=1e-5)
    assert "hold back" not in repr(pw.plan(loop))


def test_the_memory_of_a_hold_is_that_of_its_value() -> None:
    """A computation of another slice on the same device reads the value behind the hold."""
    peaks = []
    for is_held in (False, True):
        read, nodes = ValueRef(0, 0), [Node(0, (ValueRef(-1, 0),))]
        if is_held:
            nodes.append(Node(2, (ValueRef(0, 1), ValueRef(0, 0), ValueRef(0, 0)), ValueRef(0, 1)))
            read = ValueRef(1, 0)
        nodes.append(Node(1, (read,), ValueRef(0, 1)))
        nodes.append(Node(0, (ValueRef(0, 0),)))
        first, second = (Placement(n, (0,)) for n in (1, 2))
        here, there = (ArraySpec((1 << 20,), "float32", WHOLE, at) for at in (first, second))
        program = Program(
            "p",
            (
                Computation("make", b"m" * 32, first, (here,), (here, predicate_spec(first))),
                Computation("use", b"u" * 32, second, (there,), (there,)),
                hold(here),
            ),
            tuple(nodes),
            (here,),
            (Output(ValueRef(len(nodes) - 1, 0), here),),
        )
        device = DeviceAddress("host", 0)
        bindings = {n: Binding.of(n, "island", (device,)) for n in (1, 2)}
        _, memory = lower_with_memory(program, bindings)
        peaks.append([one.peaks() for one in memory])
    assert peaks[0] == peaks[1]


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_a_host_killed_while_operands_are_held_changes_no_bit() -> None:
    """Steps are in flight, of which every third one takes the branch on the other island."""
    steps = 9

    def grown(x: Any, at: Any) -> Any:
        return x * 3 + at

    with pw.LocalCluster(islands=2, devices_per_host=1) as cluster:
        slices = pw.make_virtual_device_set()
        meshes = [
            pw.Mesh(slices.add_slice(1, island=f"island-{n}").devices, ("x",)) for n in range(2)
        ]
        near, far = (pw.jit(grown, mesh=mesh) for mesh in meshes)
        is_third = pw.jit(lambda at: at % 3 == 1, mesh=meshes[1])

        @pw.program
        def step(x: Any, at: Any) -> Any:
            x = near(x, at)
            return pw.cond(
                is_third(at), lambda x: near(far(x, at), at), lambda x: near(x, at * 2), x
            )

        def run(killed: int | None) -> list[Any]:
            x, seen = pw.put(LARGE.astype(np.int32), sharding=pw.NamedSharding(meshes[0], P())), []
            for at in range(steps):
                x = step(x, np.int32(at))
                seen.append(x)
                if at == steps // 2 and killed is not None:
                    os.kill(cluster.hosts[killed].runtime_pid() or 0, signal.SIGKILL)
            return [pw.get(one) for one in seen]

        x = LARGE.astype(np.int32)
        for killed in (None, 0, 1):
            wanted = x
            for at, got in enumerate(run(killed)):
                wanted = grown(wanted, at)
                wanted = grown(grown(wanted, at), at) if at % 3 == 1 else grown(wanted, at * 2)
                np.testing.assert_array_equal(got, wanted)


def test_a_plan_shows_what_belongs_to_which_branch(place: Place) -> None:
    @pw.program
    def chosen(x: Any, limit: Any) -> Any:
        return _nested(place, pw.cond, x, limit)

    pw.block_until_ready(chosen(place.at(LARGE, P()), np.float32(1)))
    named = [
        (one.unless, one.outer, [name for name, _ in one.computations])
        for one in pw.plan(chosen).branches
    ]
    lambda_, inner = "<lambda>", "cond(<lambda>, <lambda>)"
    assert named == [
        (False, -1, ["hold back", "true_divide", lambda_, inner]),
        (False, 0, ["hold back", lambda_]),
        (True, 0, [lambda_]),
        (True, -1, [lambda_]),
    ]


def test_a_plan_shows_the_iterations_of_a_loop(place: Place) -> None:
    def is_small(x: Any) -> Any:
        return x.sum() < 1e9

    goes_on = pw.jit(is_small, mesh=place.here)

    @pw.program
    def loop(x: Any) -> Any:
        return pw.while_loop(goes_on, lambda x: place.double(place.add(x)), x, max_iterations=3)

    pw.block_until_ready(loop(place.at(LARGE, P())))
    plan = pw.plan(loop)
    assert [(one.predicate, one.unless, one.outer) for one in plan.branches] == [
        ("is_small", False, -1)
    ] * 3
    text = repr(plan)
    assert "Branches" in text
    assert "is_small is true" in text
