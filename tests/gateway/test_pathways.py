"""What scripts for Pathways on Cloud ask of the gateway, without the package `pathwaysutils`."""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.interpreters import pxla
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import _pathways

import pw
from pw.core import errors
from pw.gateway.protocol import statuses, tiles
from tests.stages.gateway_stage import Stage
from tests.stages.programs import run_python
from tests.stages.samples import examples, long

P = PartitionSpec
VALUE = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


@pytest.fixture(scope="module")
def devices(stage: Stage) -> Sequence[Any]:
    """Four devices of the first island, on two hosts, then four of the second."""
    return stage.client().devices()


@pytest.fixture(scope="module")
def layouts(devices: Sequence[Any]) -> dict[str, NamedSharding]:
    """Shardings by names: `one` lies on the first island, `two` on the second, `both` on both."""
    one = Mesh(np.array(devices[:4]).reshape(2, 2), ("x", "y"))
    turned = Mesh(np.array(devices[:4]).reshape(2, 2).T, ("x", "y"))
    two = Mesh(np.array(devices[4:]), ("x",))
    both = Mesh(np.array(devices).reshape(2, 4), ("island", "x"))
    return {
        "one": NamedSharding(one, P("x", "y")),
        "one turned": NamedSharding(turned, P("x", "y")),
        "one by columns": NamedSharding(one, P(None, ("y", "x"))),
        "one with copies": NamedSharding(one, P("y")),
        "one replicated": NamedSharding(one, P()),
        "two by rows": NamedSharding(two, P("x")),
        "two by columns": NamedSharding(two, P(None, "x")),
        "two replicated": NamedSharding(two, P()),
        "both, each with all": NamedSharding(both, P("x")),
        "both, each with a half": NamedSharding(both, P("island", "x")),
        "both, by columns": NamedSharding(both, P(None, ("x", "island"))),
        "some of both": NamedSharding(Mesh(np.array(devices[2:6]), ("x",)), P(None, "x")),
    }


def check(array: jax.Array, sharding: NamedSharding, value: Any = VALUE) -> None:
    assert array.sharding == sharding
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index])


# --- which part of an array is where -----------------------------------------------------------------


@st.composite
def named(draw: st.DrawFn) -> NamedSharding:
    """Draw a sharding of an array of three dimensions over a mesh of up to eight devices."""
    sizes = draw(
        st.lists(st.sampled_from((1, 2, 4)), min_size=1, max_size=3).filter(
            lambda sizes: math.prod(sizes) <= 8
        )
    )
    names = [f"axis{at}" for at in range(len(sizes))]
    order = draw(st.permutations(range(math.prod(sizes))))
    mesh = Mesh(np.array(jax.devices("cpu"))[order].reshape(sizes), names)
    spec: list[list[str]] = [[], [], []]
    for name in draw(st.permutations(names)):
        where = draw(st.integers(0, 3))
        if where < 3:
            spec[where].append(name)
    return NamedSharding(mesh, P(*[tuple(one) or None for one in spec]))


@given(named())
@settings(max_examples=examples(100))
def test_tiles_are_where_jax_says(sharding: NamedSharding) -> None:
    shape = (8, 8, 16)
    serialized = sharding._to_xla_hlo_sharding(3).to_proto().SerializeToString()
    where = sharding.devices_indices_map(shape)
    order = list(sharding._device_assignment)
    found = tiles.of(shape, len(order), serialized, is_replicated=False)
    for tile in range(found.distinct):
        for position in found.holders(tile):
            wanted = tuple(
                slice(*one.indices(size))
                for one, size in zip(where[order[position]], shape, strict=True)
            )
            assert tuple(slice(one.start, one.stop, 1) for one in found.box(shape, tile)) == wanted


def test_an_array_is_whole_on_some_of_its_devices() -> None:
    known = tiles.Tiles((2, 1), (0, 2, 1, 3))
    assert known.on([0, 1]) == tiles.Tiles((2, 1), (0, 1))
    assert known.on([0, 1, 2]) == tiles.Tiles((2, 1), (0, 1))
    assert known.on([0, 2]) is None


# --- the errors that elastic training looks for ------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ArrayLost("gone"), "DATA_LOSS"),
        (errors.HostLost("gone"), "DATA_LOSS"),
        (errors.ComputationTimeout("late"), "DEADLINE_EXCEEDED"),
        (errors.CheckpointNotFound("none"), "NOT_FOUND"),
    ],
)
def test_elastic_training_knows_the_code(error: errors.Error, code: str) -> None:
    assert statuses.status_of(error) == (statuses.CODES[code], str(error))


# --- processes ---------------------------------------------------------------------------------------

AS_PROXY = """
import os

import jax
from jax.extend import backend
from jax.extend.backend import ifrt_proxy

def client():
    options = ifrt_proxy.ClientConnectionOptions()
    timeout_s = os.environ.get("PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS", "30")
    options.connection_timeout_in_seconds = int(timeout_s)
    return ifrt_proxy.get_client(jax.config.read("jax_backend_target"), options)

backend.register_backend_factory("proxy", client, priority=-1)
"""
"""What `pathwaysutils.initialize` does."""

SCRIPT = (
    AS_PROXY
    + """
print([device.slice_index for device in jax.devices()], jax.jit(lambda x: x + 1)(1))
"""
)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("credentials", "timeout_s", "said"),
    [("true", "60", "[0, 0, 0, 0, 0, 0, 0, 0] 2"), ("", "5", "Invalid credentials")],
)
def test_a_script_names_the_gateway_by_its_address(
    stage: Stage, credentials: str, timeout_s: str, said: str
) -> None:
    where = {"JAX_PLATFORMS": "proxy", "JAX_BACKEND_TARGET": stage.address}
    where["IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"] = credentials
    where["PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS"] = timeout_s
    ran = run_python(["-c", SCRIPT], environment={**os.environ, **where})
    assert said in ran.stdout + ran.stderr


MOVES = [
    ("one", "one turned"),
    ("one turned", "two by rows"),
    ("one with copies", "two replicated"),
    ("one replicated", "one by columns"),
    ("both, each with all", "two by columns"),
    ("two by columns", "both, each with a half"),
    ("both, by columns", "both, each with a half"),
    ("both, each with a half", "some of both"),
    long("one", "two by columns"),
    long("one by columns", "one with copies"),
    long("two by rows", "one replicated"),
    long("one", "both, each with all"),
    long("both, each with a half", "one"),
    long("some of both", "one by columns"),
]
"""Each layout is in one that is not long."""


@pytest.mark.processes
@pytest.mark.parametrize(("here", "there"), MOVES)
def test_reshard(layouts: dict[str, NamedSharding], here: str, there: str) -> None:
    source, target = layouts[here], layouts[there]
    array = jax.device_put(VALUE, source)
    if here.startswith("one"):
        array = jax.jit(lambda x: x + 1, out_shardings=source)(array)
    wanted = np.asarray(array)
    kept, small = _pathways._transfer_to_shardings(
        [array, jax.device_put(VALUE[:, :4], layouts["one"])], [target, layouts["two by rows"]]
    )
    check(kept, target, wanted)
    check(small, layouts["two by rows"], VALUE[:, :4])
    (taken,) = _pathways._transfer_to_shardings([kept], [source], True)
    check(taken, source, wanted)
    assert kept.is_deleted()
    # the result is an ordinary array
    if here.startswith("one"):
        check(jax.jit(lambda x: x * 2, out_shardings=source)(taken), source, wanted * 2)


@pytest.mark.processes
def test_reshard_of_what_does_not_divide(layouts: dict[str, NamedSharding]) -> None:
    array = jax.device_put(np.zeros((3, 4), np.float32), layouts["one replicated"])
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="divi"):
        _pathways._transfer_to_shardings([array], [layouts["two by rows"]])[0].block_until_ready()


# --- plugin programs ---------------------------------------------------------------------------------


def encoded(data: bytes | str) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


def sharding_of(sharding: NamedSharding) -> dict[str, Any]:
    proto = sharding._to_xla_hlo_sharding(2).to_proto().SerializeToString()
    return {
        "devices": {"device_ids": [device.id for device in sharding._device_assignment]},
        "sharding": encoded(proto),
    }


def plugin(
    client: Any,
    program: Any,
    arrays: Sequence[jax.Array] = (),
    results: Sequence[tuple[tuple[int, ...], Any, NamedSharding]] = (),
) -> list[jax.Array]:
    """Run a plugin program as `pathwaysutils` does, to its end; returns its results."""
    from jax.extend.ifrt_programs import ifrt_programs

    text = program if isinstance(program, str) else json.dumps(program)
    compiled = client.compile_ifrt_program(
        ifrt_programs.make_plugin_program(text), ifrt_programs.make_plugin_compile_options()
    )
    ran = compiled.execute_sharded(arrays, with_tokens=True)
    avals = [jax.core.ShapedArray(shape, dtype) for shape, dtype, _ in results]
    handler = pxla.global_avals_to_results_handler(avals, [one[2] for one in results], True)
    made: list[jax.Array] = ran.consume_with_handlers(handler.handlers)
    ran.consume_token().block_until_ready()
    return made


def write_request(where: str, name: str, array: jax.Array) -> dict[str, Any]:
    said = sharding_of(array.sharding)  # type: ignore[arg-type]
    return {
        "b64_location": encoded(where),
        "b64_name": encoded(name),
        "b64_hlo_sharding_string": said["sharding"],
        "shape": array.shape,
        "devices": said["devices"],
        "timeout": {"seconds": 60, "nanos": 0},
    }


def read_request(
    where: str, name: str, shape: Sequence[int], dtype: str, sharding: NamedSharding
) -> dict[str, Any]:
    said = sharding_of(sharding)
    return {
        "b64_location": encoded(where),
        "b64_name": encoded(name),
        "b64_hlo_sharding_string": said["sharding"],
        "shape": {"xla_primitive_type_str": dtype, "dimensions": list(shape)},
        "devices": said["devices"],
        "timeout": {"seconds": 60, "nanos": 0},
    }


@pytest.mark.processes
def test_the_program_that_divides_otherwise(
    devices: Sequence[Any], layouts: dict[str, NamedSharding]
) -> None:
    def said(sharding: NamedSharding) -> dict[str, Any]:
        parts = sharding_of(sharding)
        return {
            "devices": parts["devices"],
            "xla_hlo_sharding": parts["sharding"],
            "memory_kind": "device",
        }

    source, target = layouts["one turned"], layouts["two by columns"]
    array = jax.device_put(VALUE, source)
    program = {"donateInput": True, "inSharding": [said(source)], "outSharding": [said(target)]}
    (made,) = plugin(
        devices[0].client, {"reshardRequest": program}, [array], [((8, 8), np.float32, target)]
    )
    check(made, target)


@pytest.mark.processes
def test_arrays_in_files(
    devices: Sequence[Any], layouts: dict[str, NamedSharding], tmp_path: Path
) -> None:
    client, where = devices[0].client, str(tmp_path)
    first = jax.device_put(VALUE, layouts["one turned"])
    second = jax.jit(lambda x: (x * 2).astype(jnp.bfloat16), out_shardings=layouts["one"])(
        jax.device_put(VALUE, layouts["one"])
    )
    for _ in range(2):  # the second time, they replace the first ones
        asked = [write_request(where, "a", first), write_request(where, "b.c", second)]
        plugin(
            client, {"bulk_persistence_write_request": {"write_requests": asked}}, [first, second]
        )
    assert sorted(os.listdir(where)) == ["a", "b.c"]
    for sharding in layouts.values():
        reads = [
            read_request(where, "a", (8, 8), "F32", sharding),
            read_request(where, "b.c", (8, 8), "BF16", sharding),
        ]
        found = plugin(
            client,
            {"bulk_persistence_read_request": {"read_requests": reads}},
            (),
            [((8, 8), np.float32, sharding), ((8, 8), jnp.bfloat16, sharding)],
        )
        check(found[0], sharding)
        check(found[1], sharding, (VALUE * 2).astype(jnp.bfloat16))
    restored = pw.restore(tmp_path / "a", jax.ShapeDtypeStruct((8, 8), np.float32))
    np.testing.assert_array_equal(np.asarray(restored), VALUE)


def _missing(where: str, sharding: NamedSharding) -> Any:
    return {"persistenceReadRequest": read_request(where, "none", (8, 8), "F32", sharding)}


def _other_shape(where: str, sharding: NamedSharding) -> Any:
    return {"persistenceReadRequest": read_request(where, "a", (4, 8), "F32", sharding)}


def _other_dtype(where: str, sharding: NamedSharding) -> Any:
    return {"persistenceReadRequest": read_request(where, "a", (8, 8), "S32", sharding)}


def _unknown_dtype(where: str, sharding: NamedSharding) -> Any:
    return {"persistenceReadRequest": read_request(where, "a", (8, 8), "F9E9M9", sharding)}


def _bucket(where: str, sharding: NamedSharding) -> Any:
    return {"persistenceReadRequest": read_request("gs://b/c", "a", (8, 8), "F32", sharding)}


def _outside(where: str, sharding: NamedSharding) -> Any:
    return {"persistenceReadRequest": read_request(where, "../a", (8, 8), "F32", sharding)}


def _incomplete(where: str, sharding: NamedSharding) -> Any:
    return {"persistenceReadRequest": {"b64_location": encoded(where)}}


def _damaged(where: str, sharding: NamedSharding) -> Any:
    request = read_request(where, "a", (8, 8), "F32", sharding)
    return {"persistenceReadRequest": request | {"b64_hlo_sharding_string": encoded(b"\xff")}}


BAD: list[tuple[Callable[[str, NamedSharding], Any], str]] = [
    (_missing, "NOT_FOUND: there is no checkpoint"),
    (_other_shape, r"a in .* is float32\[8, 8\], not float32\[4, 8\]"),
    (_other_dtype, "not int32"),
    (_unknown_dtype, "arrays of F9E9M9"),
    (_bucket, "file system that all hosts share"),
    (_outside, "cannot be the name"),
    (_incomplete, "cannot be read"),
    (lambda where, sharding: {"somethingElse": {}}, "INVALID_ARGUMENT: .*no plugin program"),
    (_damaged, "INVALID_ARGUMENT: .* cannot be read"),
    (lambda where, sharding: "no JSON", "a JSON object with one key"),
    (lambda where, sharding: [1], "a JSON object with one key"),
    (lambda where, sharding: {"reshardRequest": {"inSharding": 3}}, "cannot be read"),
]


@pytest.mark.processes
def test_bad_programs(
    devices: Sequence[Any], layouts: dict[str, NamedSharding], tmp_path: Path
) -> None:
    client, sharding = devices[0].client, layouts["one"]
    array = jax.device_put(VALUE, sharding)
    request = write_request(str(tmp_path), "a", array)
    plugin(client, {"persistenceWriteRequest": request}, [array])
    for program, words in BAD:
        with pytest.raises(jax.errors.JaxRuntimeError, match=words):
            plugin(client, program(str(tmp_path), sharding))


@pytest.mark.processes
def test_a_profile_is_no_error(devices: Sequence[Any]) -> None:
    client = devices[0].client
    plugin(client, {"profileRequest": {"traceLocation": "gs://bucket/traces"}})
    one = NamedSharding(Mesh(np.array(devices[:1]), ("x",)), P())
    options = {"traceLocation": "gs://bucket/traces", "xprofTraceOptions": {}}
    (empty,) = plugin(client, {"profileRequest": options}, (), [((1,), np.uint8, one)])
    assert np.asarray(empty).tolist() == [0]
