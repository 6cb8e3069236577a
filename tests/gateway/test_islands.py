"""One function of JAX over the devices of two islands: as plain JAX over as many devices of one process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.gateway import calling_functions
from tests.gateway.gateway_cases import (
    Case,
    Devices,
    check_as_in_plain_jax,
    is_refused,
    numbers,
    over,
    refusal,
    shards,
    trained,
)
from tests.stages.gateway_stage import Stage
from tests.stages.jax_releases import RESULTS_IN_HOST_MEMORY
from tests.stages.programs import run_python, without_address

pytestmark = pytest.mark.processes

CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Add a case."""
    CASES[function.__name__] = function
    return function


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


@pytest.fixture(scope="module")
def devices(stage: Stage) -> Sequence[Any]:
    """The gateway's devices: four of two hosts, then four of one."""
    return stage.client().devices()


def grid(devices: Devices, *axes: Any) -> NamedSharding:
    """Return a sharding over two by four devices: each row is an island."""
    return NamedSharding(Mesh(np.array(devices).reshape(2, 4), ("a", "b")), P(*axes))


ALL = ("a", "b")


@case
def training_over_all_devices(devices: Devices) -> Any:
    losses, weights, deleted, x_deleted = trained(grid(devices, ALL), grid(devices), 4)
    return losses, jax.tree.map(shards, weights), deleted, x_deleted


@case
def parameters_that_are_gathered_layer_by_layer(devices: Devices) -> Any:
    def loss(w: Any, x: Any) -> Any:
        return (lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), x, w)[0] ** 2).mean()

    w = jax.device_put(np.sin(numbers(3, 8, 8)), grid(devices, None, "a", "b"))
    x = jax.device_put(np.cos(numbers(16, 8)), grid(devices, ALL))
    made = jax.jit(jax.value_and_grad(loss), out_shardings=(grid(devices), w.sharding))(w, x)
    return made[0], shards(made[1])


@case
def pmap_over_all(devices: Devices) -> Any:
    f = jax.pmap(lambda x, y: x + lax.psum(x * y, "i"), "i", in_axes=(0, None), devices=devices)
    first = f(numbers(8, 2), 3.0)
    return shards(first), f(first, 0.5), first[2], [np.asarray(row) for row in first]


@case
def collectives_over_all(devices: Devices) -> Any:
    mesh = grid(devices).mesh
    ring = [(at, (at + 3) % 8) for at in range(8)]
    mapped = partial(jax.shard_map, mesh=mesh, in_specs=P(ALL))
    sums = jax.jit(
        mapped(lambda x: (lax.psum(x.sum(), ALL), lax.pmax(x, "a")), out_specs=(P(), P("b")))
    )
    rest = jax.jit(
        mapped(
            lambda x: (
                lax.all_gather(x, "a", tiled=True),
                lax.ppermute(x, ALL, ring),
                lax.all_to_all(x.reshape(8, -1), ALL, 0, 1),
                lax.psum_scatter(x, ALL, tiled=True),
                lax.axis_index("a")[None] * 10 + lax.axis_index("b")[None],
            ),
            out_specs=P(ALL),
        )
    )
    return sums(numbers(64)), rest(numbers(64))


@case
def shardings_that_xla_chooses(devices: Devices) -> Any:
    x = jax.device_put(numbers(16, 8), grid(devices, "b", "a"))
    made = jax.jit(lambda x: (x @ x.T, x.sum(0), x.T, jnp.sort(x, 0), x.mean()))(x)
    return [(str(one.sharding.spec), shards(one)) for one in made]


@case
def some_devices_of_each(devices: Devices) -> Any:
    uneven = jax.device_put(numbers(10, 2), over(devices[1:6], "x"))
    backwards = jax.device_put(numbers(6, 2), over(devices[6:3:-1], "x"))
    f = jax.jit(lambda x: (x - x.mean(), x[::-1], jnp.cumsum(x)))
    return [[shards(one) for one in f(each)] for each in (uneven, backwards)]


@case
def arrays_and_their_shards(devices: Devices) -> Any:
    split = grid(devices, ALL)
    double = jax.jit(lambda x: x * 2)
    x = double(jax.device_put(numbers(16, 2), split))
    pieces = [one.data for one in x.addressable_shards]
    again = jax.make_array_from_single_device_arrays(x.shape, split, [one + 1 for one in pieces])
    y = double(again)
    y.copy_to_host_async()
    same = double(jax.device_put(numbers(3), grid(devices)))
    x.delete()
    return np.asarray(y), shards(same), same.is_fully_replicated, refusal(lambda: double(x))[0]


@case
def arrays_that_are_divided_anew(devices: Devices) -> Any:
    x = jax.jit(lambda x: x + 1)(jax.device_put(numbers(8, 8), grid(devices, ALL)))
    found = []
    for target in (
        grid(devices, None, ALL),
        grid(devices, "b"),
        grid(devices),
        over(devices[:4], "x"),
        over(devices[3:5], None, "x"),
        over(devices[::-1], "x"),
    ):
        moved = jax.device_put(x, target)
        found.append((shards(moved), shards(jax.device_put(moved, x.sharding))))
    return found


@case
def donation_of_parts(devices: Devices) -> Any:
    split = grid(devices, ALL)
    f = jax.jit(lambda x, y: (x + y, y.sum()), donate_argnums=0)
    x, y = (jax.device_put(numbers(16) + at, split) for at in range(2))
    piece = x.addressable_shards[5].data
    total = f(x, y)
    states = [one.is_deleted() for one in (x, y, total[0])], is_refused(lambda: piece * 2)
    return shards(total[0]), total[1], states, f(total[0], y)


@case
def nothing_in_or_out(devices: Devices) -> Any:
    where = grid(devices, ALL)
    made = jax.jit(
        lambda: (jnp.arange(16.0), jnp.float32(2)), out_shardings=(where, grid(devices))
    )()
    nothing = jax.jit(lambda x: None)(made[0])
    same = jax.jit(lambda x, y: (y, x))(*made)
    return [shards(one) for one in made], nothing, [shards(one) for one in same]


@case
def compiling_ahead(devices: Devices) -> Any:
    split, same = grid(devices, ALL), grid(devices)
    f = jax.jit(lambda x, y: (x @ y, (x @ y).sum()), donate_argnums=0)
    x, y = jax.device_put(numbers(8, 8), split), jax.device_put(numbers(8, 8), same)
    compiled = f.lower(x, y).compile()
    memory = compiled.memory_analysis()
    assert "all-reduce" in compiled.as_text()
    assert compiled.cost_analysis()["flops"] > 0
    return (
        compiled(x, y),
        x.is_deleted(),
        [str(one.spec) for one in compiled.input_shardings[0]],
        [str(one.spec) for one in compiled.output_shardings],
        memory.argument_size_in_bytes,
    )


@case
def shardings_as_before_shardy(devices: Devices) -> Any:
    x = jax.device_put(numbers(16, 8), grid(devices, "b", "a"))
    with jax.enable_x64(False):
        jax.config.update("jax_use_shardy_partitioner", False)
        try:
            return [shards(one) for one in jax.jit(lambda x: (x * 2, x.sum(1)))(x)]
        finally:
            jax.config.update("jax_use_shardy_partitioner", True)


@case
def memories_of_hosts(devices: Devices) -> Any:
    split, same = grid(devices, ALL), grid(devices)
    pinned, outside = (one.with_memory_kind("pinned_host") for one in (split, same))
    x = jax.device_put(numbers(8, 2), pinned)
    if RESULTS_IN_HOST_MEMORY:
        f = jax.jit(
            lambda x: (x * 2, x.sum(0)), in_shardings=pinned, out_shardings=(pinned, outside)
        )
        made = f(x)
    else:
        made = jax.device_put((x * 2, jax.device_put(x, split).sum(0)), (pinned, outside))
    back = jax.device_put(made[0], split)
    moved = jax.device_put(back, grid(devices, "b").with_memory_kind("pinned_host"))
    every = [*made, back, moved]
    return [shards(one) for one in every], [one.sharding.memory_kind for one in every]


@case
def all_sorts_of_dtypes(devices: Devices) -> Any:
    split = grid(devices, ALL)
    kinds = ("bool", "int8", "uint16", "int4", "float16", "bfloat16", "complex64", "float8_e4m3fn")
    values = {kind: numbers(16).astype(jnp.dtype(kind)) for kind in kinds}
    made = jax.jit(lambda tree: jax.tree.map(lambda x: x[::-1], tree))(
        jax.device_put(values, split)
    )
    assert {kind: one.dtype for kind, one in made.items()} == {
        kind: jnp.dtype(kind) for kind in kinds
    }
    return jax.tree.map(lambda x: np.asarray(x).astype(np.complex64), made)


@pytest.mark.parametrize("name", CASES)
def test_it_is_as_in_plain_jax(name: str, devices: Sequence[Any]) -> None:
    check_as_in_plain_jax(CASES[name], devices)


def test_what_cannot_be_cut_is_refused_in_words(devices: Sequence[Any]) -> None:
    sharding = grid(devices, ALL)
    x = jax.device_put(numbers(16), sharding)

    def doubled(x: Any) -> Any:
        axes = sharding.mesh.axis_names
        return lax.while_loop(lambda c: lax.psum(c.sum(), axes) < 1e6, lambda c: c * 2, x)

    mapped = jax.shard_map(
        doubled, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=sharding.spec
    )
    f = jax.jit(mapped)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="cannot run on several islands: a loop needs"
    ):
        f(x)


SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
split = NamedSharding(mesh, P(("a", "b")))
x = jax.device_put(np.arange(16, dtype=np.float32), split)
seen = []

@jax.jit
def f(x):
    jax.debug.print("sum {}", x.sum())
    y = jax.pure_callback(lambda v: np.square(v), jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    for at in range(3):
        io_callback(lambda v: seen.append(float(v)), None, y[5] + at, ordered=True)
    return jax.lax.scan(lambda c, _: (c - c.mean(), c.max()), y, length=2)

@jax.jit
def g(x):
    return jax.lax.cond(x.sum() > 0, lambda x: jax.debug.print("yes") or x - x.mean(),
                        lambda x: jax.debug.print("no") or x + x.max(), x)

@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P(("a", "b")), out_specs=P(("a", "b")))
def h(x):
    jax.debug.callback(lambda v: seen.append(float(v[1])), x)
    return x

print(f(x)[1])
jax.effects_barrier()
print(seen)
g(x)
jax.effects_barrier()
seen.clear()
h(x)
jax.effects_barrier()
print(sorted(seen))
seen.clear()

@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P(("a", "b")), out_specs=None)
def k(x):
    for at in range(2):
        io_callback(lambda v: seen.append(float(v[0])), None, x + at, ordered=True)

k(x)
jax.effects_barrier()
print(sorted(seen))
seen.clear()

few = NamedSharding(jax.sharding.Mesh(mesh.devices[1], ("b",)), P("b"))

@jax.jit
def l(x):
    for at in range(3):
        io_callback(lambda v: seen.append(float(v.sum())), None, x + at, ordered=True)

l(jax.device_put(np.ones(4, np.float32), few))
jax.effects_barrier()
print(seen)
"""

STEPS = "[0.0, 2.0, 4.0, True, 8.0, 10.0]"
"""What it prints of the steps that it waits for."""


def test_functions_of_the_script_are_called_once() -> None:
    variables = {"JAX_PLATFORMS": "pw", "PW_DEVICES": "8", "PW_ISLANDS": "2"}
    ran = run_python(["-c", SCRIPT], environment=without_address() | variables)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines() == [
        "sum 120.0",
        "[225.  147.5]",
        "[25.0, 26.0, 27.0]",
        "yes",
        "[1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0]",
        str([float(at) for at in range(16)]),
        "[4.0, 8.0, 12.0]",
    ]


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(calling_functions.FEW, id="of each kind"),
        pytest.param(tuple(calling_functions.KINDS), marks=pytest.mark.long, id="all"),
    ],
)
def test_functions_of_the_script_are_called_wherever_they_stand(kinds: tuple[str, ...]) -> None:
    """In loops, branches and maps, with elements and slices: values and calls are those of plain JAX."""
    variables = {"JAX_PLATFORMS": "pw", "PW_DEVICES": "4", "PW_ISLANDS": "2"}
    arguments = ["-m", calling_functions.__name__, *kinds]
    ran = run_python(arguments, environment=without_address() | variables, timeout_s=60.0)
    assert ran.returncode == 0, ran.stderr
    warned = [line for line in ran.stderr.splitlines() if "is not divided over islands" in line]
    assert warned
    for line in warned:
        assert line.startswith("pw gateway: warning: a loop of '_lambda' (calling_functions.py:")
    over_islands = [json.loads(line) for line in ran.stdout.splitlines()]
    here = calling_functions.run(jax.devices()[:4], kinds)
    for ours, theirs in zip(over_islands, here, strict=True):
        assert ours == json.loads(json.dumps(theirs))


RAISING = """
import jax, numpy as np
like = jax.ShapeDtypeStruct((), np.float32)
doubled = jax.pmap(lambda x: jax.experimental.io_callback(lambda v: np.asarray(v) * 2, like, x))
print(doubled(np.arange(4, dtype=np.float32)))
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("d",))
x = jax.device_put(np.arange(8.0), NamedSharding(mesh, P("d")))

def wrong(v):
    raise ValueError("bad batch")

for function in (jax.pure_callback, jax.experimental.io_callback):
    try:
        jax.block_until_ready(jax.jit(lambda x: function(wrong, x, x) + x.sum())(x))
    except jax.errors.JaxRuntimeError as error:
        print("bad batch" in str(error))
print(jax.jit(lambda x: x.sum())(x))

def picky(v):
    return wrong(v) if v == 3 else v

step = jax.jit(lambda x: jax.pure_callback(picky, like, x) * 2)
came = []
for at in range(6):
    try:
        came.append(float(step(np.float32(at)).block_until_ready()))
    except jax.errors.JaxRuntimeError as error:
        came.append("bad batch" in str(error))
print(came)
"""


def test_functions_of_the_script_return_or_fail_the_call() -> None:
    variables = {"JAX_PLATFORMS": "pw", "PW_DEVICES": "4", "PW_ISLANDS": "2"}
    script = "import jax.experimental\n" + RAISING
    ran = run_python(["-c", script], environment=without_address() | variables, timeout_s=60.0)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["[0. 2. 4. 6.]", "True", "True", "28.0", STEPS]


def test_islands_are_slices_if_that_is_asked_for() -> None:
    script = """
import jax
from jax.experimental import mesh_utils
print([one.slice_index for one in jax.devices()])
print(mesh_utils.create_hybrid_device_mesh((2, 1), (1, 2)).shape)
"""
    variables = {
        "JAX_PLATFORMS": "pw",
        "PW_DEVICES": "4",
        "PW_ISLANDS": "2",
        "PW_SLICES": "islands",
        "PW_ISLAND": "1",
    }
    ran = run_python(["-c", script], environment=without_address() | variables)
    assert ran.stdout.splitlines() == ["[0, 0, 1, 1]", "(2, 2)"], ran.stderr
    assert "pw reads no environment variable PW_ISLAND; did you mean PW_ISLANDS?" in ran.stderr


ARRAYS = """
import jax, numpy as np, pw, pw.jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
values = np.arange(64, dtype=np.float32).reshape(8, 8)
for spec in (P("a", "b"), P("b"), P(("b", "a")), P(None, "b"), P()):
    x = jax.jit(lambda x: x * 2)(jax.device_put(values, NamedSharding(mesh, spec)))
    y = pw.jax.from_jax(x)
    z = pw.jax.to_jax(y)
    assert z.sharding == x.sharding, (z.sharding, x.sharding)
    assert all((np.asarray(one) == values * 2).all() for one in (y, z))
    for a, b in zip(x.addressable_shards, z.addressable_shards):
        assert a.device == b.device and (np.asarray(a.data) == np.asarray(b.data)).all()
turned = Mesh(np.array(jax.devices())[[0, 5, 2, 7, 4, 1, 6, 3]], ("x",))
x = jax.device_put(values, NamedSharding(turned, P("x")))
y = pw.jax.to_jax(pw.jax.from_jax(x))
assert y.sharding == x.sharding and (np.asarray(y) == values).all()
key = jax.device_put(jax.random.key(3), NamedSharding(mesh, P()))
again = pw.jax.to_jax(pw.jax.from_jax(key))
assert (jax.random.key_data(key) == jax.random.key_data(again)).all()

split = NamedSharding(mesh, P(("a", "b")))
double = jax.jit(lambda x: x * 2, out_shardings=split)
mean = jax.jit(lambda x: x.mean(0), in_shardings=split)

@pw.program
def f(x):
    return mean(double(x))

print(f(jax.device_put(values, split)))
pw.checkpoint(jax.device_put(values, split)).result()
"""


def test_arrays_become_those_of_pw_and_back() -> None:
    variables = {"JAX_PLATFORMS": "pw", "PW_DEVICES": "8", "PW_ISLANDS": "2"}
    ran = run_python(["-c", ARRAYS], environment=without_address() | variables)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "[56. 58. 60. 62. 64. 66. 68. 70.]\n"
