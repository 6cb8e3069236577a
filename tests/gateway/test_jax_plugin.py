"""JAX's plugin `pw`: what a script sees that knows nothing of pw."""

from __future__ import annotations

import pytest

import pw
from tests.stages.scripts import finish, start_client

pytestmark = pytest.mark.processes

CHECK = """
asked = jax.config.jax_platforms
assert len(jax.devices()) == 2
assert jax.devices("pw") == jax.devices()
assert jax.config.jax_platforms == asked, jax.config.jax_platforms
own = jax.devices("cpu")[0].client is not jax.devices()[0].client
assert own == ("cpu" in asked), asked
if not own:
    assert jax.devices(jax.default_backend()) == jax.devices()
    assert jax.local_devices(backend="cpu") == jax.devices() and jax.device_count("cpu") == 2

seen = []
@jax.jit
def step(v):
    jax.debug.callback(lambda u: seen.append((u * 2, *u.devices())), v)
    return jax.pure_callback(lambda u: np.asarray(jax.jit(jnp.sin)(u)), v, v)

x = jnp.arange(3.0) + 1
np.testing.assert_allclose(step(x), np.sin([1, 2, 3]), rtol=1e-6)
jax.debug.callback(lambda u: seen.append((u * 2, *u.devices())), x)
jax.effects_barrier()
assert len(seen) == 2
for doubled, device in seen:
    assert doubled.tolist() == [2, 4, 6] and device.client is not jax.devices()[0].client
assert jnp.from_dlpack(np.arange(3.0)).tolist() == [0, 1, 2]
print("well")
"""


@pytest.mark.parametrize("platforms", ["pw", "pw,cpu"])
def test_cpu_is_the_cluster_unless_the_script_asks_for_its_own(platforms: str) -> None:
    """Callbacks have the script's own CPU in both cases."""
    settings = {"JAX_PLATFORMS": platforms, "PW_DEVICES": "2", "XLA_FLAGS": ""}
    assert finish(start_client("", CHECK, **settings)) == "well\n"


MOVES = """
cluster, cpu = jax.devices()[0], jax.devices("cpu")[0]
mesh = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices(), ("x",)), P("x"))
here, there = jax.sharding.SingleDeviceSharding(cpu), jax.sharding.SingleDeviceSharding(cluster)
one = lambda v: v + 1
plus, on_cpu, on_cluster, on_mesh = (
    jax.jit(one),
    jax.jit(one, in_shardings=here),
    jax.jit(one, in_shardings=there),
    jax.jit(one, in_shardings=mesh),
)
mapped = jax.pmap(one, devices=[cpu])

def with_default(function, x):
    with jax.default_device(cpu):
        return function(x)

def check(result, device):
    assert result.devices() == device, (result.devices(), device)
    assert np.asarray(result, np.float32).ravel().tolist() == [2, 3, 4, 5], result

x = jnp.arange(4.0) + 1
y = with_default(lambda x: jnp.arange(4.0) + 1, None)
fixed = jnp.asarray(np.arange(4.0) + 1, device=cpu)
everywhere = set(jax.devices())
for _ in range(3):  # JAX's later calls of a function take another way than its first
    check(with_default(plus, x), {cpu})
    check(with_default(lambda v: v + 1, x), {cpu})
    check(mapped(x[None]), {cpu})
    check(on_cpu(x), {cpu})
    check(on_cluster(y), {cluster})
    check(on_cluster(jnp.asarray(np.arange(4.0) + 1)), {cluster})
    check(plus(jax.device_put(fixed, cluster)), {cluster})
    check(plus(jax.device_put(fixed, mesh)), everywhere)
    check(on_mesh(y), everywhere)
    check(plus(jax.device_put(jax.device_put(x, mesh), cpu)), {cpu})
    check(plus(y), {cpu} if y.committed else {cluster})
    check(plus(x), {cluster})

small = jax.device_put(jnp.arange(4, dtype=jnp.int4) + 1, cpu)
check(plus(jax.device_put(small, cluster)), {cluster})
key = jax.random.key(3)
number = float(jax.random.uniform(key))
assert float(with_default(jax.random.uniform, key)) == number
for source, target in ((x, here), (y, there)):
    source = source + 0
    check(plus(jax.device_put(source, target, donate=True)), target.device_set)
    assert source.is_deleted()
gone = jnp.arange(4.0) + 1
gone.delete()
for function, error in (
    (lambda: with_default(plus, gone), RuntimeError),
    (lambda: jax.device_put(x, cluster) + fixed, ValueError),
):
    try:
        function()
    except error as said:
        assert "deleted" in str(said) or "incompatible devices" in str(said), said
    else:
        raise AssertionError(function)
print("well")
"""


CHANGES = """
f = jax.jit(lambda v: v + 1)
split = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices(), ("x",)), P("x"))
ways = {
    "array": jnp.array,
    "array of a type": lambda a: jnp.array(a, dtype=jnp.float32),
    "array of lists": lambda a: jnp.array([a, a]),
    "array and call": lambda a: f(jnp.array(a)),
    "put": jax.device_put,
    "put on one": lambda a: jax.device_put(a, jax.devices()[1]),
    "put split": lambda a: jax.device_put(a, split),
    "put on each": lambda a: jax.device_put(a, jax.sharding.NamedSharding(split.mesh, P())),
}
for size in (4, 1000, 200_000, 1_000_000):
    for name, way in ways.items():
        if name.startswith("put") and size == 1_000_000:
            continue
        made = []
        for number in range(20):
            a = np.full(size, number, np.float32)
            made.append(way(a))
            a[:] = -100
        for number, x in enumerate(made):
            assert set(np.unique(np.asarray(x))) <= {number, number + 1}, (size, name, number)
print("well")
"""


def test_a_numpy_array_that_changes_after_it_was_put_changes_nothing() -> None:
    settings = {"JAX_PLATFORMS": "pw", "PW_DEVICES": "2", "XLA_FLAGS": ""}
    assert finish(start_client("", CHANGES, **settings)) == "well\n"


def test_values_move_between_the_cluster_and_this_machine() -> None:
    """JAX moves arguments between two of its clients."""
    settings = {"JAX_PLATFORMS": "pw,cpu", "PW_DEVICES": "2", "XLA_FLAGS": ""}
    assert finish(start_client("", MOVES, **settings)) == "well\n"


AGAIN = """
import pw.jax
for _ in range(2):
    pw.jax.connect(devices=2)
    print(len(jax.devices()))
stats = jax.devices()[1].memory_stats()
if stats:
    x = jax.block_until_ready(jax.device_put(np.zeros(1 << 16, np.uint8), jax.devices()[1]))
    more = jax.devices()[1].memory_stats()["bytes_in_use"] - stats["bytes_in_use"]
    stats = (stats["bytes_limit"], more, jax.devices()[0].memory_stats()["bytes_in_use"])
print(stats, jax.local_devices(backend="script_cpu")[0].memory_stats())
try:
    pw.jax.connect(device=1)
except pw.ArgumentError as error:
    assert "did you mean devices" in str(error)
try:
    pw.jax.connect(devices=1)
except pw.Error as error:
    print(error)
"""
STARTED = """
import pw.jax
print(len(jax.devices()))
pw.jax.connect()

from jax._src import monitoring
import tempfile
folder, events = tempfile.TemporaryDirectory(), []
monitoring.register_event_listener(lambda name, **about: events.append(name))
monitoring.register_event_duration_secs_listener(lambda name, length_s, **about: events.append(name))
jax.config.update("jax_compilation_cache_dir", folder.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

x = jnp.arange(4.0)
lowered = jax.jit(lambda v: v @ v).lower(x)
refused = [
    lambda: memoryview(x),
    x.unsafe_buffer_pointer,
    lambda: x.__cuda_array_interface__,
]
for use in refused:
    try:
        use()
    except (jax.errors.JaxRuntimeError, BufferError):
        continue
    raise AssertionError(use)
assert memoryview(np.asarray(x)).nbytes == 16
assert jax.devices()[0].memory_stats() is None, "nothing bounds the memory"

from jax.experimental.custom_partitioning import custom_partitioning
partitioned = custom_partitioning(lambda v: v * 2)
partitioned.def_partition(
    infer_sharding_from_operands=lambda mesh, shapes, result: shapes[0].sharding,
    partition=lambda mesh, shapes, result: (mesh, lambda v: v * 2, result.sharding, (result.sharding,)),
    sharding_rule="i -> i",
)
split = jax.device_put(x, jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices(), ("x",)), P("x")))
sizes = jax.device_put(np.ones((2, 2), np.int32), split.sharding)
ragged = jax.shard_map(
    lambda v, n: jax.lax.ragged_all_to_all(v, v, n[0] - 1, n[0], n[0] - 1, n[0], axis_name="x"),
    mesh=split.sharding.mesh, in_specs=P("x"), out_specs=P("x"),
)
compiled = lambda x=x, **options: jax.jit(lambda v: v + 2).lower(x).compile(options)(x)
for use, words in (
    (lambda: jax.jit(partitioned)(split), "CustomSPMDPartitioning"),
    (lambda: jax.jit(ragged)(split, sizes), "ragged_all_to_all"),
    (lambda: jax.jit(jax.ffi.ffi_call("no_such_target", x))(x), "no_such_target"),
    (lambda: compiled(xla_dump_to="/tmp"), "xla_dump_to"),
    (lambda: compiled(split, xla_dump_to="/tmp"), "xla_dump_to"),
    (lambda: compiled(xla_no_such_thing=1), "xla_no_such_thing"),
):
    try:
        jax.block_until_ready(use())
    except jax.errors.JaxRuntimeError as error:
        assert str(error).startswith("INVALID_ARGUMENT: ") and words in str(error), error
    else:
        raise AssertionError(words)
for one in (x, split):
    kept = compiled(one, xla_dump_max_hlo_modules=1, xla_dump_hlo_as_text=True)
    assert kept.tolist() == [2, 3, 4, 5]

for lower in (lowered, jax.jit(lambda v: v @ v).lower(split)):
    assert lower.cost_analysis()["flops"] and lower.compile().cost_analysis()["flops"]
for remote in (x, split):
    copy = np.from_dlpack(remote)
    assert copy.tolist() == np.from_dlpack(remote, copy=True).tolist() == [0, 1, 2, 3]
    assert copy.dtype == np.float32 and remote.__dlpack_device__() == (1, 0)
    try:
        np.from_dlpack(remote, copy=False)
        raise AssertionError("it has shared the memory of another machine")
    except BufferError:
        pass
half = jax.dlpack.from_dlpack(x.astype(jnp.bfloat16))
assert not os.listdir(folder.name) and not any("cache_hits" in name for name in events)
assert "/jax/core/compile/backend_compile_duration" in events
assert half.dtype == jnp.bfloat16 and (half + x).tolist() == [0, 2, 4, 6]
"""
"""It is connected by JAX_PLATFORMS, and does what `docs/jax.md` says that JAX's client refuses or not."""


def test_the_same_connection_again_is_no_error_and_another_names_the_first() -> None:
    with pw.LocalCluster(devices_per_host=2, device_memory="1GiB", connect=False) as cluster:
        started = {
            where: start_client(
                where, AGAIN, JAX_PLATFORMS="", XLA_FLAGS="", PW_EMBEDDED_DEVICE_MEMORY="1GiB"
            )
            for where in ("", cluster.address)
        }
        for where, script in started.items():
            two, two_again, memory, refused = finish(script).splitlines()
            assert (two, two_again) == ("2", "2")
            assert memory == f"{1 << 30, 1 << 16, 0} None"
            said = f"address={where!r}, " if where else ""
            assert f"by pw.jax.connect({said}devices=2, share=1.0)" in refused


@pytest.mark.parametrize("islands", [1, 2])
def test_what_is_refused_is_what_the_documents_say(islands: int) -> None:
    settings = {
        "JAX_PLATFORMS": "pw",
        "PW_DEVICES": "2",
        "PW_ISLANDS": f"{islands}",
        "XLA_FLAGS": "",
    }
    assert finish(start_client("", STARTED, **settings)) == "2\n"
