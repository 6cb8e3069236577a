"""What a plan moves between islands, and in which order its computations run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pw.client.arrays.devices import make_virtual_device_set
from pw.client.arrays.mesh import OwnMesh
from pw.client.computations import joined as traced
from pw.client.functions.jit import jit
from pw.islands import sums
from pw.islands.plan import Code, Plan, PlanLoop
from pw.islands.running import run
from tests.stages.local_runtime import LocalRuntime

ISLANDS, EACH, WIDTH, LAYERS = 2, 4, 8, 6
BATCH = P(("island", "data"))
X = jax.ShapeDtypeStruct((16, WIDTH), np.float32)
W = jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32)
STACK = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), np.float32)


class Value(NamedTuple):
    """A value of a plan that is run without values."""

    island: int
    maker: str
    elements: int


class Seen:
    """What a run of a plan does."""

    def __init__(self, plan: Plan, arguments: int) -> None:
        self.order: list[str] = []
        """The names of the computations of the first island."""
        self.taken = 0
        """Elements that the first island takes from others."""
        given = [
            [Value(island, "an argument", 0) for island in range(ISLANDS)] for _ in range(arguments)
        ]
        run(plan, given, lambda number, island: Value(island, "a number", 1), self._call)

    def _call(self, code: Code, island: int, given: list[Value]) -> list[Value]:
        if island == 0:
            self.order.append(code.name)
            for value, lies in zip(given, code.inputs, strict=True):
                if value.island > 0:
                    self.taken += int(np.prod(lies.shape))
        return [Value(island, code.name, int(np.prod(lies.shape))) for lies in code.outputs]


@pytest.fixture(autouse=True)
def rt() -> Iterator[LocalRuntime]:
    with LocalRuntime.in_use(("east", "west")) as local:
        yield local


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    joined = make_virtual_device_set().add_slice(devices=ISLANDS * EACH, islands=ISLANDS)
    mesh = OwnMesh(np.reshape(joined.devices, (ISLANDS, EACH)), ("island", "data"))
    found: list[Plan] = []
    plan = traced.cut

    def noted(*args: Any, **how: Any) -> Plan:
        found.append(plan(*args, **how))
        return found[-1]

    monkeypatch.setattr(traced, "cut", noted)

    def of(function: Callable[..., Any], specs: Any, arguments: Any, out: Any = None) -> Plan:
        how = {} if out is None else {"out_shardings": out}
        jit(function, mesh=mesh, in_shardings=specs, **how).lower(*arguments)
        return found[-1]

    return of


def layers(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), x, w)[0]


def loss(w: Any, x: Any) -> Any:
    return (layers(w, x) ** 2).mean()


def test_sums_of_a_scan_over_layers_wait_behind_it(planned: Callable[..., Plan]) -> None:
    plan = planned(jax.grad(loss), (None, BATCH), (STACK, X))
    assert not [step for step in plan.steps if isinstance(step, PlanLoop)]
    seen = Seen(plan, 2)
    assert len(seen.order) == 3  # gradients, their sum, the results
    assert seen.taken == LAYERS * WIDTH * WIDTH


def test_large_sums_take_two_parts_of_what_they_add(
    planned: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums, "SMALL_BYTES", 64)
    seen = Seen(planned(jax.grad(loss), (None, BATCH), (STACK, X)), 2)
    assert seen.taken == 2 * (ISLANDS - 1) / ISLANDS * LAYERS * WIDTH * WIDTH


@pytest.mark.parametrize("whole_bytes", [16, 64 << 10])
def test_an_island_takes_no_more_of_split_weights_than_it_needs(
    planned: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, whole_bytes: int
) -> None:
    monkeypatch.setattr(sums, "SMALL_BYTES", whole_bytes)
    split = P(None, "island")
    plan = planned(jax.value_and_grad(loss), (split, BATCH), (STACK, X), (P(), split))
    layer = WIDTH * WIDTH
    missing = layer * (ISLANDS - 1) // ISLANDS
    # Forward and backward the part of each layer that is elsewhere; of each gradient the island's own part.
    assert Seen(plan, 2).taken - 2 * LAYERS * missing - LAYERS * layer // ISLANDS <= ISLANDS


def test_the_next_layer_travels_while_one_is_computed(planned: Callable[..., Plan]) -> None:
    plan = planned(layers, (P(None, "island"), BATCH), (STACK, X))
    order = [name for name in Seen(plan, 2).order if "iteration" in name]
    sent = [at for at, name in enumerate(order) if "iteration, 1 of 2" in name]
    computed = [at for at, name in enumerate(order) if "iteration, 2 of 2" in name]
    assert len(sent) == len(computed) == LAYERS
    assert all(after < before for after, before in zip(sent[1:], computed, strict=False))
    assert all(later > before for later, before in zip(sent[2:], computed, strict=False))


def test_small_gathers_travel_together(planned: Callable[..., Plan]) -> None:
    def two(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda h, own: (jnp.tanh(h @ own[0]) @ own[1], None), x, w)[0]

    plan = planned(two, ((P(None, "island"), P(None, "island")), BATCH), ((STACK, STACK), X))
    (loop,) = [step for step in plan.steps if isinstance(step, PlanLoop)]
    away = [
        ref
        for step in loop.first
        if not isinstance(step, PlanLoop)
        for ref in step.inputs[0]
        if ref.island
    ]
    assert len(away) == 1


def test_chunks_of_an_all_to_all_are_sent_once(planned: Callable[..., Plan]) -> None:
    def swapped(x: Any) -> Any:
        def body(rows: Any) -> Any:
            return jax.lax.all_to_all(rows, ("island", "data"), 1, 0, tiled=True)

        return jax.shard_map(body, in_specs=BATCH, out_specs=BATCH)(x)

    plan = planned(swapped, (BATCH,), (X,))
    # Half of what an island gets comes from the other one.
    assert Seen(plan, 1).taken == 16 * WIDTH // ISLANDS // ISLANDS


def test_equal_islands_share_code(planned: Callable[..., Plan]) -> None:
    plan = planned(lambda x, w: jnp.cumsum(x @ w, 0), (BATCH, None), (X, W))
    assert all(len(set(step.codes)) == 1 for step in plan.steps if not isinstance(step, PlanLoop))
