"""What scripts do with JAX: each case takes eight devices, and returns what a script would see.

Devices 0 to 3 and devices 4 to 7 are alike. A test runs each case on devices of plain JAX and on devices
of the gateway, and compares the values, the errors and which arrays are deleted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import export, lax
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from tests.stages.jax_releases import RESULTS_IN_HOST_MEMORY

Devices = Sequence[Any]
Case = Callable[[Devices], Any]

CASES: dict[str, Case] = {}

DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "int4", "uint4", "int2", "uint2"),
    "float4_e2m1fn",
)


def case(function: Case) -> Case:
    """Add a case."""
    CASES[function.__name__] = function
    return function


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """Return numbers that differ."""
    return np.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape)


def over(devices: Devices, *axes: Any, memory_kind: str | None = None) -> NamedSharding:
    """Return a sharding over devices in a line, the axis `x`."""
    return NamedSharding(Mesh(np.array(devices), ("x",)), P(*axes), memory_kind=memory_kind)


def square(devices: Devices, *axes: Any) -> NamedSharding:
    """Return a sharding over two by two devices."""
    return NamedSharding(Mesh(np.array(devices[:4]).reshape(2, 2), ("x", "y")), P(*axes))


def shards(array: Any) -> list[Any]:
    """Return which part of an array lies on which device."""
    return [
        (one.device.id % 8, str(one.index), one.replica_id, np.asarray(one.data))
        for one in array.addressable_shards
    ]


def refusal(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the error of a call: its type, and the words before what differs between devices."""
    try:
        jax.block_until_ready(call())
    except Exception as error:  # noqa: BLE001 - each kind is compared
        return type(error).__name__, str(error).split("\n")[0].split("with shape")[0][:40]
    return "no error", ""


def is_refused(call: Callable[[], Any]) -> bool:
    """Return whether a call is refused because an array was deleted."""
    try:
        jax.block_until_ready(call())
    except (RuntimeError, ValueError) as error:
        return "deleted" in str(error) or "donated" in str(error)
    return False


def seen(case: Case, devices: Devices) -> Any:
    """Return what a case returns, with numpy's arrays for JAX's."""
    with jax.default_device(devices[0]):
        return jax.tree.map(
            lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, case(devices)
        )


def check_as_in_plain_jax(case: Case, devices: Devices) -> None:
    """Compare what a case returns on these devices and on plain JAX's."""
    plain = seen(case, jax.devices("cpu")[:8])
    here = seen(case, devices)
    wanted, structure = jax.tree.flatten_with_path(plain)
    found, structure_found = jax.tree.flatten(here)
    assert structure_found == structure
    for one, (path, other) in zip(found, wanted, strict=True):
        where = jax.tree_util.keystr(path)
        if isinstance(other, np.ndarray | np.generic | float):
            assert np.asarray(one).dtype == np.asarray(other).dtype, where
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5, err_msg=where)
        else:
            assert one == other, where


# --- placement ---------------------------------------------------------------------------------------


@case
def puts_on_each_device(devices: Devices) -> Any:
    put = [jax.device_put(numbers(3) + at, device) for at, device in enumerate(devices)]
    assert [one.devices() for one in put] == [{device} for device in devices]
    return [one + 1 for one in put], [jax.device_put(put[0], device) for device in devices]


@case
def describes_its_devices(devices: Devices) -> Any:
    return [(one.platform, one.process_index, one.default_memory().kind) for one in devices]


@case
def a_sharded_matrix_product(devices: Devices) -> Any:
    split = over(devices[:4], "x")
    x = jax.device_put(numbers(8, 6), split)
    product = jax.jit(lambda x: x @ x.T)(x)
    doubled = jax.jit(lambda x: x * 2, out_shardings=split)(x)
    for _ in range(3):
        doubled = jax.jit(lambda x: x * 2, out_shardings=split)(doubled)
    assert doubled.sharding.is_equivalent_to(split, 2)
    return product, doubled, shards(x), shards(doubled)


@case
def a_mesh_of_two_dimensions_with_transposed_specs(devices: Devices) -> Any:
    x = jax.device_put(numbers(8, 12), square(devices, "x", "y"))
    f = jax.jit(
        lambda a: lax.with_sharding_constraint(a.T @ a, square(devices, "y", "x")) + 1,
        out_shardings=square(devices, None, "x"),
    )
    moved = [
        jax.device_put(x, square(devices, *axes))
        for axes in (("y", "x"), (None, "x"), (("x", "y"),), (None, ("y", "x")), ())
    ]
    return shards(f(x)), [shards(one) for one in moved]


@case
def device_put_between_islands(devices: Devices) -> Any:
    here, there = devices[:4], devices[4:]
    x = jax.device_put(numbers(8, 2), over(here, "x"))
    whole = jax.device_put(x, over(there, "x"))
    one = jax.device_put(x, there[2])
    back = jax.device_put(jax.jit(lambda x: x + 1)(whole), over(here, None, None))
    tree = jax.device_put({"a": x, "b": [one, 3.0]}, over(there))
    transposed = jax.device_put(
        jax.device_put(numbers(4, 4), square(here, "x", "y")), square(there, "y", "x")
    )
    return shards(whole), one, shards(back), tree, shards(transposed)


@case
def arrays_over_both_islands(devices: Devices) -> Any:
    x = jax.device_put(numbers(16, 2), over(devices, "x"))
    same = jax.device_put(numbers(2), over(devices))
    parts = [one.data + 1 for one in x.addressable_shards]
    again = jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)
    left = jax.device_put(again, over(devices[:4], "x"))
    return shards(x), shards(same), shards(again), shards(left)


@case
def another_order_of_devices(devices: Devices) -> Any:
    x = jax.device_put(numbers(8), over(devices[:4], "x"))
    backwards = jax.device_put(x, over(devices[3::-1], "x"))
    doubled = jax.jit(lambda a: a * 2)(backwards)
    turned = jax.jit(lambda a: a + 1, out_shardings=over(devices[3::-1], "x"))(backwards)
    return shards(backwards), shards(doubled), shards(turned)


@case
def some_of_the_devices(devices: Devices) -> Any:
    three = jax.device_put(numbers(6, 2), over(devices[1:4], "x"))
    uneven = refusal(lambda: jax.device_put(numbers(5), over(devices[:4], "x")))
    inner = jax.jit(
        lambda x: lax.with_sharding_constraint(jnp.sin(x), over(devices[:4], "x")) * 2,
        out_shardings=over(devices[:4]),
    )
    elsewhere = refusal(lambda: jax.device_put(1.0, devices[0]) + jax.device_put(1.0, devices[1]))
    two = (over(devices[:2], "x"), over(devices[2:4], "x"))
    mixed = refusal(lambda: jax.jit(jnp.add)(*(jax.device_put(numbers(4), one) for one in two)))
    return shards(three * three.sum()), inner(numbers(8)), elsewhere, mixed, uneven[0]


@case
def replicated_on_a_part_of_the_axes(devices: Devices) -> Any:
    x = jax.device_put(numbers(4, 2), square(devices, "y"))
    return shards(x), shards(x.sum(axis=0)), x.is_fully_replicated, x[1:3]


# --- programs ----------------------------------------------------------------------------------------


@case
def collectives_in_shard_map(devices: Devices) -> Any:
    mesh = Mesh(np.array(devices[:4]), ("x",))
    ring = [(at, (at + 1) % 4) for at in range(4)]
    mapped = partial(jax.shard_map, mesh=mesh, in_specs=P("x"))
    sums = jax.jit(mapped(lambda x: lax.psum(x.sum(), "x"), out_specs=P()))
    rest = jax.jit(
        mapped(
            lambda x: (
                lax.all_gather(x, "x", tiled=True),
                lax.ppermute(x, "x", ring),
                lax.all_to_all(x.reshape(4, -1), "x", 0, 1),
                lax.psum_scatter(x, "x", tiled=True),
                lax.axis_index("x")[None],
            ),
            out_specs=P("x"),
        )
    )
    return sums(numbers(16)), rest(numbers(16))


@case
def pmap_with_its_collectives(devices: Devices) -> Any:
    f = jax.pmap(lambda x, y: x + lax.psum(x * y, "i"), "i", in_axes=(0, None), devices=devices[:4])
    first = f(numbers(4, 2), 3.0)
    loop = first
    for _ in range(3):
        loop = f(loop, 0.5)
    return shards(first), loop, loop[2], [np.asarray(row) for row in loop]


@case
def control_flow(devices: Devices) -> Any:
    x = jax.device_put(numbers(6), devices[1])
    eager = lax.fori_loop(0, 10, lambda i, c: c * 1.1 + i, x)

    @jax.jit
    def f(x: Any) -> Any:
        return (
            lax.while_loop(lambda c: c.sum() < 1000, lambda c: c * 2, x),
            lax.scan(lambda c, y: (c + y, c * y), 0.0, x),
            lax.cond(x[0] > 1, jnp.sin, jnp.cos, x),
            [lax.switch(at, [jnp.sin, jnp.cos, jnp.tan], x) for at in (0, 2)],
            lax.map(lambda y: y**2, x),
            jax.vmap(lambda y: lax.cond(y > 2, jnp.sin, jnp.cos, y))(x),
        )

    return eager, f(x)


@case
def linear_algebra(devices: Devices) -> Any:
    @jax.jit
    def f(x: Any) -> Any:
        values, vectors = jnp.linalg.eigh(x @ x.T)
        q, r = jnp.linalg.qr(x)
        return (
            jnp.linalg.inv(x),
            jnp.linalg.svd(x, compute_uv=False),
            jnp.linalg.cholesky(x @ x.T),
            jnp.linalg.solve(x, numbers(5)),
            (values, jnp.abs(vectors)),
            q @ r,
            jnp.fft.fft(x),
            jnp.sort(x, axis=0),
        )

    return f(jax.device_put(numbers(5, 5) % 7 + 5 * np.eye(5, dtype=np.float32), devices[2]))


@case
def random_numbers(devices: Devices) -> Any:
    key = jax.device_put(jax.random.key(7), devices[5])
    keys = jax.random.split(key, 3)
    drawn = jax.jit(
        lambda key: jax.random.normal(key, (8, 2)), out_shardings=over(devices[:4], "x")
    )(jax.device_put(jax.random.key(1), over(devices[:4])))
    return (
        jax.random.key_data(keys),
        jax.random.uniform(keys[1], (4,)),
        jax.random.permutation(key, 10),
        shards(drawn),
    )


def trained(split: NamedSharding, same: NamedSharding, steps: int) -> Any:
    """Train with donated weights; return the losses, the weights, and which arguments are deleted."""

    def loss(weights: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ weights["in"]) @ weights["out"] - y) ** 2)

    @partial(jax.jit, donate_argnums=0)
    def step(weights: Any, x: Any, y: Any) -> Any:
        value, slopes = jax.value_and_grad(loss)(weights, x, y)
        return jax.tree.map(lambda a, b: a - 0.1 * b, weights, slopes), value

    first = {"in": np.sin(numbers(6, 16)), "out": np.cos(numbers(16, 1))}
    weights = jax.device_put(first, same)
    before = weights
    x = jax.device_put(np.sin(numbers(32, 6) * 0.1), split)
    losses = []
    for _ in range(steps):
        weights, value = step(weights, x, x[:, :1] * 2)
        losses.append(value)
    return losses, weights, [one.is_deleted() for one in before.values()], x.is_deleted()


@case
def training_with_donation(devices: Devices) -> Any:
    split, same = over(devices[:4], "x"), over(devices[:4])
    losses, *rest = trained(split, same, 10)
    assert float(losses[-1]) < float(losses[0])
    return losses, *rest


@case
def a_program_without_arguments_or_results(devices: Devices) -> Any:
    with jax.default_device(devices[6]):
        none = jax.jit(lambda: ())()
        made = jax.jit(lambda: (jnp.arange(3), jnp.float32(2)))()
    nothing = jax.jit(lambda x: None)(jax.device_put(numbers(2), devices[6]))
    over_four = jax.jit(lambda x: ())(jax.device_put(numbers(4), over(devices[:4], "x")))
    assert made[0].devices() == {devices[6]}
    return none, made, nothing, over_four


@case
def constants_of_any_size_in_a_program(devices: Devices) -> Any:
    large, small = jnp.asarray(numbers(300, 300)), numbers(3)
    f = jax.jit(lambda x: (large * x).sum(axis=0)[:5] + small[0], device=None)
    return f(jax.device_put(2.0, devices[0])), f(jax.device_put(3.0, devices[0]))


@case
def gradients_and_transformations(devices: Devices) -> Any:
    f = jax.jit(lambda x: jnp.sum(jnp.sin(x) ** 3))

    @jax.jit
    def every(x: Any) -> Any:
        return (
            jax.hessian(f)(x),
            jax.jvp(f, (x,), (x,)),
            jax.vmap(jax.grad(f))(jnp.stack([x, x * 2])),
            jax.jacrev(jnp.cumsum)(x),
            jax.checkpoint(f)(x),
        )

    x = jax.device_put(numbers(4) / 3, devices[3])
    return jax.grad(f)(x), every(x)


# --- values ------------------------------------------------------------------------------------------


@case
def all_dtypes(devices: Devices) -> Any:
    dtypes = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in DTYPES}
    bits = np.array([0, 1, 1, 0, 1, 1, 0, 1])
    values = {name: bits.astype(dtype) for name, dtype in dtypes.items()}
    with jax.enable_x64(True):
        one = jax.device_put(values, devices[1])
        four = jax.device_put(values, over(devices[:4], "x"))
        longer = jax.jit(lambda every: jax.tree.map(lambda a: jnp.concatenate([a, a[:1]]), every))
        found = one, four, longer(one)
        assert [{name: each.dtype for name, each in every.items()} for every in found] == [
            dtypes
        ] * 3
        return jax.tree.map(lambda each: np.asarray(each).real.astype(np.float32), found)


@case
def sixty_four_bits(devices: Devices) -> Any:
    with jax.enable_x64(True):
        x = jax.device_put(numbers(5, dtype=np.float64) * 1e-10 + 1, devices[0])
        y = jax.jit(lambda x: x * 2 - 1)(x)
        z = jnp.sum(jax.device_put(np.array([2**40, 1]), devices[0]))
        assert (y.dtype, z.dtype) == (np.float64, np.int64)
    narrow = jax.device_put(numbers(3, dtype=np.float64), devices[0])
    return y, z, str(narrow.dtype), narrow


@case
def input_with_strides(devices: Devices) -> Any:
    base = numbers(4, 6)
    # JAX's remote client refuses strides of zero and less itself.
    views = (base.T, base[:, ::2], base[1:, 1:], base.T[::2, 1:3], np.asfortranarray(base))
    views = (*views, base[:0], base[:, 2:3])
    return (
        [jax.device_put(view, devices[5]) for view in views],
        shards(jax.device_put(numbers(8, 6).T, over(devices[:4], None, "x"))),
        shards(jax.device_put(base.T, over(devices[:4]))),
    )


@case
def zero_size_arrays(devices: Devices) -> Any:
    empty = jax.device_put(np.zeros((0, 3), np.float32), devices[0])
    split = jax.device_put(np.zeros((4, 0), np.float32), over(devices[:4], "x"))
    return (
        empty,
        empty.sum(axis=0),
        jnp.concatenate([empty, jax.device_put(numbers(1, 3), devices[0])]),
        shards(split),
        shards(jax.jit(lambda x: x + 1)(split)),
        jax.device_put(empty, devices[4]),
        jax.device_put(split, over(devices[4:], "x")),
    )


@case
def scalars_and_indexing(devices: Devices) -> Any:
    x = jax.device_put(numbers(4, 5), devices[7])
    y = (x * 2 + 1).sum()
    return float(y), int(x[1, 2]), x.at[1].set(0), x[:, ::-2], list(x[0]), y.item()


@case
def large_arrays(devices: Devices) -> Any:
    value = numbers(1024, 1024)
    x = jax.device_put(value, over(devices[:4], "x"))
    one = jax.device_put(value, devices[6])
    return np.asarray(x).sum(), np.asarray(x.T + 1), jax.device_put(one, devices[0]) * 2


# --- arrays of shards --------------------------------------------------------------------------------


@case
def arrays_from_callbacks_and_from_shards(devices: Devices) -> Any:
    whole, split = numbers(16), over(devices[:4], "x")
    x = jax.make_array_from_callback((16,), split, lambda index: whole[index])
    parts = [jax.device_put(whole[4 * at :][:4], devices[at]) for at in range(4)]
    y = jax.make_array_from_single_device_arrays((16,), split, parts)
    first = jax.jit(lambda x: x * 2)(y)
    z = jax.make_array_from_single_device_arrays(
        (16,), split, [one.data for one in first.addressable_shards]
    )
    same = jax.make_array_from_single_device_arrays(
        (4,), over(devices[:4]), [jax.device_put(whole[:4], one) for one in devices[:4]]
    )
    return x, y, first, shards(z + 1), shards(same), same + x.sum()


@case
def pieces_of_pieces(devices: Devices) -> Any:
    x = jax.device_put(numbers(8), over(devices[:4], "x"))
    pieces = [one.data for one in x.addressable_shards]
    pair = jax.make_array_from_single_device_arrays((4,), over(devices[1:3], "x"), pieces[1:3])
    del x
    inner = [one.data for one in pair.addressable_shards]
    del pair
    return [one * 2 for one in pieces], [one + 1 for one in inner]


@case
def deleting_an_array_and_its_pieces(devices: Devices) -> Any:
    x = jax.device_put(numbers(8), over(devices[:4], "x")) + 0
    piece = x.addressable_shards[1].data
    again = jax.make_array_from_single_device_arrays(
        x.shape, x.sharding, [one.data for one in x.addressable_shards]
    )
    kept = x + 1
    x.delete()
    states = [one.is_deleted() for one in (x, piece, kept)]
    # That `again` is deleted, the remote client knows only when it is used.
    used = [lambda: x + 1, lambda: np.asarray(x), lambda: piece * 2, lambda: np.asarray(again)]
    return states, [is_refused(use) for use in used], kept


@case
def donating_pieces_and_wholes(devices: Devices) -> Any:
    taking = jax.jit(lambda x: x + 1, donate_argnums=0)
    found: list[Any] = []
    for donate_whole in (True, False):
        x = jax.device_put(numbers(8), over(devices[:4], "x")) + 0
        piece = x.addressable_shards[1].data
        other = x.addressable_shards[2].data
        found.append(taking(x) if donate_whole else taking(piece))
        found.append(x.is_deleted() if donate_whole else piece.is_deleted())
        found.append([is_refused(lambda one=one: one * 2) for one in (piece, other)])
    return found  # plain JAX crashes if `x` is used now


@case
def donating_in_other_ways(devices: Devices) -> Any:
    split = over(devices[:4], "x")
    f = jax.jit(lambda x, y: (x + y, y), donate_argnums=(0,), out_shardings=(split, split))
    x, y = (jax.device_put(numbers(8) + at, split) for at in range(2))
    total = f(x, y)
    alone = jax.device_put(numbers(8), devices[0])
    twice_given = is_refused(lambda: jax.jit(jnp.add, donate_argnums=0)(alone, alone))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a donation that cannot be used
        z = jax.device_put(numbers(8), split)
        small = jax.jit(lambda z: z[:1], donate_argnums=0)(z)
    put = jax.device_put(numbers(4), devices[0]) + 0
    moved = jax.device_put(put, devices[1], donate=True)
    mapped = jax.pmap(lambda v: v * 2, donate_argnums=0, devices=devices[:4])
    given = jax.device_put(numbers(4, 2), split)
    twice = mapped(given)
    states = [one.is_deleted() for one in (x, y, put, given, small, total[0])]
    return total, states, twice_given, small, moved, twice


@case
def copies_live_on(devices: Devices) -> Any:
    x = jax.device_put(numbers(4), devices[3])
    copies = jnp.copy(x), x.copy(), jnp.array(x, copy=True)
    x.copy_to_host_async()
    first = np.asarray(x)
    x.delete()
    return first, [(one.is_deleted(), is_refused(lambda one=one: one + 1)) for one in (x, *copies)]


# --- around programs ---------------------------------------------------------------------------------


@case
def compiling_ahead_of_time(devices: Devices) -> Any:
    lowered = jax.jit(lambda x, y: x @ y + 1, donate_argnums=0).lower(
        jax.ShapeDtypeStruct((8, 8), np.float32, sharding=over(devices[:4], "x")),
        jax.ShapeDtypeStruct((8, 8), np.float32, sharding=over(devices[:4])),
    )
    compiled = lowered.compile()
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    text = compiled.as_text()
    assert "HloModule" in text
    assert memory.argument_size_in_bytes > 0
    x = jax.device_put(numbers(8, 8), over(devices[:4], "x"))
    y = jax.device_put(numbers(8, 8), over(devices[:4]))
    return (
        compiled(x, y),
        x.is_deleted(),
        cost["flops"],
        [memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.alias_size_in_bytes],
        text.count("dot("),
        refusal(lambda: compiled(y, y))[0],
    )


@case
def compiling_a_small_function_ahead_of_time(devices: Devices) -> Any:
    one = SingleDeviceSharding(devices[1])
    like = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=one)
    compiled = jax.jit(lambda x: (jnp.sin(x) + 1, x > 2)).lower(like).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    x = jax.device_put(numbers(8, 8), one)
    return (
        compiled(x),
        compiled.cost_analysis()["flops"],
        [memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.alias_size_in_bytes],
        "gateway_cases.py" in text,
        text.count("sine("),
        refusal(lambda: compiled(x[:2]))[0],
    )


@case
def values_that_move_between_memories(devices: Devices) -> Any:
    """Between one device and four, in every memory; then they are used, split and on one device."""
    value, step, found = numbers(8, 8), jax.jit(lambda x: x + 1), []
    kinds = ("device", "pinned_host", "unpinned_host")
    places = [SingleDeviceSharding(devices[5], memory_kind=kind) for kind in kinds]
    places += [over(devices[:4], "x", memory_kind=kind) for kind in kinds]
    for source in places:
        for target in places:
            moved = jax.device_put(jax.device_put(value, source), target)
            before = np.asarray(moved).copy()
            split = jax.device_put(moved, over(devices[:4], "x"))
            one = jax.device_put(moved, SingleDeviceSharding(devices[1]))
            found.append((before, step(split), step(one), np.asarray(one)))
            found.append([each.sharding.memory_kind for each in (moved, split, one)])
    return found


@case
def memories_of_devices(devices: Devices) -> Any:
    pinned = over(devices[:4], "x", memory_kind="pinned_host")
    x = jax.device_put(numbers(8), pinned)
    back = jax.device_put(x, over(devices[:4], "x"))
    one = jax.device_put(numbers(3), SingleDeviceSharding(devices[4], memory_kind="unpinned_host"))
    if RESULTS_IN_HOST_MEMORY:
        out = jax.jit(lambda x: x * 2, out_shardings=pinned)(back)
    else:
        out = jax.device_put(back * 2, pinned)
    kinds = [each.sharding.memory_kind for each in (x, back, one, out)]
    return shards(x), shards(back + 1), one, shards(out), kinds


@case
def layouts_inside_of_a_function(devices: Devices) -> Any:
    found = []
    one, some, every = (
        SingleDeviceSharding(devices[1]),
        over(devices[:4], "x"),
        over(devices, "x"),
    )
    for sharding in (one, some, every):
        turned = Format(Layout((1, 0)), sharding)
        f = jax.jit(lambda x, turned=turned: lax.with_sharding_constraint(x + 1, turned).T * 2)
        found.append(f(jax.device_put(numbers(8, 4), sharding)))
    return found


@case
def checks_for_nans(devices: Devices) -> Any:
    x = jax.device_put(np.float32(-1), devices[0])
    with jax.debug_nans(True):
        return refusal(lambda: jnp.log(x))[0], jnp.exp(x)


@case
def exported_functions(devices: Devices) -> Any:
    f = jax.jit(lambda x: x * 3 + x.sum())
    one = export.export(f)(jax.ShapeDtypeStruct((4,), np.float32))
    blob = one.serialize()
    same = export.deserialize(blob).call(jax.device_put(numbers(4), devices[6]))
    split = over(devices[:4], "x")
    four = export.export(f)(jax.ShapeDtypeStruct((8,), np.float32, sharding=split))
    return same, jax.jit(four.call)(jax.device_put(numbers(8), split))


@case
def constants_that_come_again(devices: Devices) -> Any:
    """On one device and on several; donated, and deleted."""
    here, there = SingleDeviceSharding(devices[0]), over(devices)
    x = jax.device_put(numbers(4), here)
    y = jax.device_put(numbers(8), over(devices, "x"))
    for _ in range(4):
        x = x * 2.0 + 1.0
        y = y + jax.device_put(np.float32(3), there)
    bump = jax.jit(lambda one: one + 1, donate_argnums=0)
    sevens = [jax.device_put(np.float32(7), here) for _ in range(4)]
    eights = [bump(seven) for seven in sevens]
    deleted = jax.device_put(np.float32(7), here)
    deleted.delete()
    last = jax.device_put(np.float32(7), here)
    return x, y, eights, [one.is_deleted() for one in (*sevens, deleted, last)], last


@case
def values_that_are_read_at_each_step(devices: Devices) -> Any:
    """Then not for some steps, and again; one of them is donated to the next step."""
    here = SingleDeviceSharding(devices[0])
    step = jax.jit(
        lambda count, x: (count + 1, x * 1.5, jnp.stack([jnp.sum(x), count])), donate_argnums=0
    )
    count, x = jax.device_put(np.float32(0), here), jax.device_put(numbers(3), here)
    read = []
    for at in range(12):
        before = count
        count, x, sums = step(count, x)
        if not 4 <= at < 8:
            read.append((float(count), np.asarray(sums), before.is_deleted()))
    return read, x


@case
def values_that_are_awaited_at_each_step(devices: Devices) -> Any:
    """Then not for some steps, and again; also values that are donated, deleted or never used afterwards."""
    here = SingleDeviceSharding(devices[0])
    step = jax.jit(lambda x, y: (x + y, x * y), donate_argnums=0)
    twice = jax.jit(lambda x: x * 2)
    x, y = jax.device_put(numbers(64, 64), here), jax.device_put(np.float32(0.5), here)
    split = jax.device_put(numbers(8), over(devices, "x"))
    seen: list[Any] = []
    for at in range(16):
        before = x
        x, product = step(x, y)
        if at % 8 < 5:
            x.block_until_ready()
            seen.append((before.is_deleted(), is_refused(lambda gone=before: twice(gone))))
        if at % 8 == 4:
            product.delete()
        split = twice(split)
        if at % 4:
            split.block_until_ready()
            seen.append(float(twice(y.block_until_ready())))
            y = jax.device_put(np.float32(at), here)
    return seen, x, split


@case
def errors_of_compiling(devices: Devices) -> Any:
    x = jax.device_put(numbers(3), devices[0])
    unknown = jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct(x.shape, x.dtype))
    try:
        jax.jit(unknown)(x).block_until_ready()
    except Exception as error:  # noqa: BLE001 - compared
        return type(error).__name__, "no_such_target" in str(error), x
    raise AssertionError("an unknown target was compiled")


@case
def ready_arrays(devices: Devices) -> Any:
    x = jax.device_put(numbers(64, 64), devices[0])
    y = jax.jit(lambda x: x @ x)(x)
    jax.block_until_ready({"x": x, "y": [y, 1]})
    return x.nbytes, x.on_device_size_in_bytes(), y.weak_type, y
