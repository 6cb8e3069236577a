"""Arrays in each memory beside devices, under JAX's names: what plain JAX does, `pw` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pw
from pw.client.computations import export
from pw.testing import InProcessCluster
from tests.stages.inside import number_of, type_of
from tests.stages.jax_releases import RESULTS_IN_HOST_MEMORY
from tests.stages.stage import mesh_on, numbers

pytestmark = [
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
    pytest.mark.skipif(
        not RESULTS_IN_HOST_MEMORY, reason="JAX has no results in host memory on CPUs"
    ),
]

KINDS = ("device", "pinned_host", "unpinned_host")
X = numbers(8)


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(islands=2, devices_per_island=4) as cluster:
        yield cluster


@pytest.fixture
def mesh(cluster: InProcessCluster) -> pw.Mesh:
    return mesh_on(0)


class Place(NamedTuple):
    """A mesh, and JAX's or pw's functions."""

    mesh: Mesh
    jit: Callable[..., Any]
    put: Callable[..., Any]

    def over(self, kind: str | None = None, *axes: str) -> NamedSharding:
        """The sharding over the mesh, by default with all of the first dimension on it."""
        return NamedSharding(self.mesh, P(*(axes or ("x",))), memory_kind=kind)


def plain() -> Place:
    return Place(Mesh(np.array(jax.devices()[:2]), ("x",)), jax.jit, jax.device_put)


def arrays(place: Place) -> list[Any]:
    return [place.put(X, place.over(kind)) for kind in KINDS]


def from_host(place: Place, **how: Any) -> Callable[..., Any]:
    def compute(x: Any) -> Any:
        return jax.device_put(x, place.over("device")) * 2 + 1

    return place.jit(compute, **how)


def inside(x: Any) -> Any:
    return jax.device_put(x * 2, jax.memory.Space.Host)


def there_and_back(place: Place) -> Callable[[Any], Any]:
    def compute(x: Any) -> Any:
        away = jax.device_put(x * 2, place.over("pinned_host"))
        return jax.device_put(away, place.over("device")) + 1

    return place.jit(compute)


def gradient(place: Place) -> Callable[[Any], Any]:
    def loss(x: Any) -> Any:
        return (jax.device_put(x, place.over("device")) ** 2).sum()

    return place.jit(jax.grad(loss))


CASES: dict[str, Callable[[Place, Any, Any, Any], Any]] = {
    "of each": lambda place, *each: [place.jit(lambda x: x + 1)(x) for x in each],
    "as it is": lambda place, *each: [place.jit(lambda x: x)(x) for x in each],
    "operators": lambda place, device, host, _: [host + 1, host * host, -host, host.sum()],
    "results": lambda place, device, *_: [
        place.jit(lambda x: x + 1, out_shardings=place.over(kind))(device) for kind in KINDS
    ],
    "a result comes back": lambda place, device, host, _: place.jit(
        lambda x: x + 1, out_shardings=place.over()
    )(host),
    "arguments": lambda place, *each: [
        place.jit(lambda x: x + 1, in_shardings=place.over(kind))(x)
        for x, kind in zip(each, KINDS, strict=True)
    ],
    "moves in functions": lambda place, *each: [from_host(place)(x) for x in each],
    "to a space": lambda place, device, host, _: [place.jit(inside)(x) for x in (device, host)],
    "there and back": lambda place, device, *_: there_and_back(place)(device),
    "a gradient": lambda place, device, host, _: [gradient(place)(x) for x in (device, host)],
    "loops": lambda place, device, host, _: place.jit(
        lambda x: jax.lax.scan(lambda x, _: (x + 1, None), x, None, length=3)[0]
    )(host),
    "jax.device_put": lambda place, *each: [
        jax.device_put(x, place.over(kind)) for x in each for kind in KINDS
    ],
    "spaces": lambda place, device, host, _: [
        jax.device_put(x, space)
        for x in (device, host)
        for space in (jax.memory.Space.Device, jax.memory.Space.Host)
    ],
    "closures": lambda place, device, host, _: place.jit(
        lambda x: x + jax.device_put(host, place.over())
    )(device),
}


def found(results: Any) -> list[Any]:
    """The value, the spec and the kind of memory of each array."""
    return [
        (np.asarray(x).tolist(), x.sharding.spec, x.sharding.memory_kind)
        for x in jax.tree.leaves(results)
    ]


@pytest.mark.parametrize("what", CASES)
def test_as_plain_jax(what: str, mesh: pw.Mesh) -> None:
    case, ours = CASES[what], Place(mesh, pw.jit, pw.put)
    theirs = plain()
    assert found(case(ours, *arrays(ours))) == found(case(theirs, *arrays(theirs)))


WRONG: dict[str, Callable[[Place, Any, Any, Any], Any]] = {
    "mixed": lambda place, device, host, _: place.jit(jnp.add)(host, device),
    "in_shardings of the device": lambda place, device, host, _: place.jit(
        jnp.sin, in_shardings=place.over()
    )(host),
    "in_shardings of the host": lambda place, device, *_: place.jit(
        jnp.sin, in_shardings=place.over("pinned_host")
    )(device),
    "an unknown kind": lambda place, *_: place.over("foo"),
}


@pytest.mark.parametrize("what", WRONG)
def test_errors_of_plain_jax(what: str, mesh: pw.Mesh) -> None:
    ours, theirs = Place(mesh, pw.jit, pw.put), plain()
    words = "device.*pinned_host|pinned_host.*device|memory_space"
    for place in (ours, theirs):
        with pytest.raises(ValueError, match=words):
            WRONG[what](place, *arrays(place))


def test_shardings(mesh: pw.Mesh) -> None:
    own, host = (NamedSharding(mesh, P("x"), memory_kind=kind) for kind in (None, "pinned_host"))
    assert own == own.with_memory_kind("device") != host
    assert hash(own) == hash(own.with_memory_kind("device"))
    assert host == own.with_memory_kind("pinned_host")
    assert (own.memory_kind, host.memory_kind) == ("device", "pinned_host")
    x = pw.put(X, host)
    assert x.sharding == host
    assert pw.put(x, sharding=host) is x
    assert pw.put(x, sharding=own).sharding == own
    with pytest.raises(pw.ShardingError, match=r"'foo' is no memory .*'cpu'.*'pinned_host'"):
        type_of(x).sharding.with_memory_kind("foo")


def test_shards_are_where_the_sharding_says(cluster: InProcessCluster, mesh: pw.Mesh) -> None:
    """Uploads, moves, results of functions and of programs; the hosts' arrays are looked at."""
    place = Place(mesh, pw.jit, pw.put)
    x = pw.put(X, place.over())
    for kind in KINDS:
        made = [
            pw.put(X, place.over(kind)),
            pw.put(x, place.over(kind)),
            pw.jit(lambda x: x + 1, out_shardings=place.over(kind))(x),
            pw.program(lambda x, kind=kind: jax.device_put(x + 1, place.over(kind)))(x),
            pw.program(lambda x, kind=kind: pw.put(x * 2, place.over(kind)) + 0)(x),
        ]
        pw.block_until_ready(made)
        assert [_kind(cluster, array) for array in made[:4]] == [kind] * 4
        assert [array.sharding.memory_kind for array in made] == [
            *[kind] * 4,
            "device" if kind == "unpinned_host" else kind,
        ]


def _kind(cluster: InProcessCluster, array: Any) -> str:
    """The memory that the shards of an array are really in."""
    store: Any = cluster.hosts[0].node.actors["store"]
    payload = store.arrays[number_of(array)].value.payload
    (kind,) = {shard.data.sharding.memory_kind for shard in payload.addressable_shards}
    return str(kind)


def test_programs(mesh: pw.Mesh) -> None:
    """A value is read in the memory in which JAX traced what reads it, wherever a call left it."""
    place, there = Place(mesh, pw.jit, pw.put), Place(mesh_on(1), pw.jit, pw.put)
    keep = pw.jit(lambda x: x * 2, out_shardings=place.over("pinned_host"))
    use = pw.jit(lambda x: x + 1, mesh=there.mesh)
    from_there = pw.jit(
        lambda x: jax.device_put(x, place.over()) + 1, in_shardings=place.over("pinned_host")
    )

    @pw.program
    def steps(x: Any) -> Any:
        kept = keep(x)
        both = use(kept), use(jax.device_put(kept, there.over()))
        far = jax.device_put(kept, there.over("pinned_host"))
        space = jax.device_put(kept + 1, jax.memory.Space.Host)
        return kept, *both, far, space, from_there(kept), from_there(space)

    results = steps(pw.put(X, place.over()))
    kinds = [x.sharding.memory_kind for x in results]
    host, device = "pinned_host", "device"
    assert kinds == [host, device, device, host, host, device, device]
    assert [x.sharding.mesh == place.mesh for x in results] == [1, 0, 0, 0, 1, 1, 1]
    expected = [2 * X, 2 * X + 1, 2 * X + 1, 2 * X, 2 * X + 1, 2 * X + 1, 2 * X + 2]
    for result, values in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, values)


def test_branches_and_loops(mesh: pw.Mesh) -> None:
    place = Place(mesh, pw.jit, pw.put)
    x = pw.put(X, place.over("pinned_host"))
    twice, more = pw.jit(lambda x: x * 2), pw.jit(lambda x: x + 1)
    for chosen, values in ((True, X * 2), (False, X + 1)):
        result = pw.cond(pw.put(chosen, place.over(None, None)), twice, more, x)
        assert result.sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(result, values)
    number = pw.put(np.int32(0), NamedSharding(mesh, P()))
    few, step = pw.jit(lambda n, x: n < 3), pw.jit(lambda n, x: (n + 1, x * 2))
    _, result = pw.while_loop(lambda c: few(*c), lambda c: step(*c), (number, x))
    assert result.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(result, X * 8)


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_donation(source: str, target: str, mesh: pw.Mesh) -> None:
    place = Place(mesh, pw.jit, pw.put)
    x = pw.put(X, place.over(source))
    result = from_host(place, donate_argnums=0, out_shardings=place.over(target))(x)
    assert x.is_deleted()
    assert result.sharding.memory_kind == target
    np.testing.assert_array_equal(result, X * 2 + 1)
    again = jax.device_put(result, place.over(source), donate=True)
    assert result.is_deleted() == (source != target)
    np.testing.assert_array_equal(again, X * 2 + 1)
    with pytest.raises(pw.ArrayDeleted):
        pw.jit(lambda x: x + 1)(x)


def test_memory_of_devices(cluster: InProcessCluster, mesh: pw.Mesh) -> None:
    """What users have in host memory is not counted on the devices."""

    def sizes() -> tuple[int, int]:
        devices = pw.memory().devices
        return (
            sum(device.arrays_bytes or 0 for device in devices),
            sum(device.host_bytes or 0 for device in devices),
        )

    place, before = Place(mesh, pw.jit, pw.put), sizes()
    big = numbers(1 << 18)
    x = pw.block_until_ready(pw.put(big, place.over("pinned_host")))
    device, host = (now - earlier for now, earlier in zip(sizes(), before, strict=True))
    others = 1 << 12
    """Bytes of arrays of other tests that are freed meanwhile, at most."""
    assert abs(device) < others
    assert abs(host - big.nbytes) < others
    y = pw.block_until_ready(pw.put(x, place.over()))
    assert abs(sizes()[0] - before[0] - y.nbytes) < others


def test_checkpoints(mesh: pw.Mesh, tmp_path: Path) -> None:
    """They are saved from each memory, and restored into each."""
    place, there = Place(mesh, pw.jit, pw.put), Place(mesh_on(1), pw.jit, pw.put)
    tree = {kind: pw.put(X + at, place.over(kind)) for at, kind in enumerate(KINDS)}
    pw.checkpoint(tree, path=tmp_path / "c").result()
    pw.checkpoint(list(tree.values())).result()
    for turn in range(len(KINDS)):
        kinds = KINDS[turn:] + KINDS[:turn]
        like = {
            kind: (place, there)[turn % 2].over(new) for kind, new in zip(KINDS, kinds, strict=True)
        }
        restored = pw.restore(tmp_path / "c", like)
        for kind, array in tree.items():
            assert restored[kind].sharding == like[kind]
            np.testing.assert_array_equal(restored[kind], array)
    same = pw.restore(tmp_path / "c", tree)
    assert [same[kind].sharding.memory_kind for kind in KINDS] == list(KINDS)


def test_names(mesh: pw.Mesh) -> None:
    tree = {kind: pw.put(X, Place(mesh, pw.jit, pw.put).over(kind)) for kind in KINDS}
    pw.publish("kinds", tree)
    shared = pw.lookup("kinds")
    for kind, array in shared.items():
        assert array.sharding.memory_kind == kind
        np.testing.assert_array_equal(array, X)
    pw.unpublish("kinds")


def test_policies_that_offload(mesh: pw.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy of `jax.checkpoint` reaches the compiler of GPUs; on CPUs JAX leaves it out."""
    place = Place(mesh, pw.jit, pw.put)
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["layer"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(w: Any, x: Any) -> Any:
        return jnp.sin(checkpoint_name(jnp.sin(w * x), "layer") * w).sum()

    own, offloading = jax.grad(loss), jax.grad(jax.checkpoint(loss, policy=policy))
    w, x = pw.put(X, place.over()), pw.put(X / 8, place.over())
    np.testing.assert_array_equal(pw.jit(offloading)(w, x), pw.jit(own)(w, x))
    monkeypatch.setattr(export, "jax_platform", lambda name: "cuda")
    for function, moves in ((own, 0), (offloading, 2)):
        code = pw.jit(lambda *args, function=function: function(*args)).lower(w, x).as_text()
        assert code.count("@annotate_device_placement") == moves


def test_islands(cluster: InProcessCluster) -> None:
    """Arrays over several islands lie in host memory of each."""
    joined = pw.make_virtual_device_set().add_slice(devices=4, islands=2)
    place = Place(Mesh(np.reshape(joined.devices, 4), ("x",)), pw.jit, pw.put)
    x, host = pw.put(X, place.over()), pw.put(X, place.over("pinned_host"))
    moved, kept = there_and_back(place)(x), pw.jit(lambda x: x + 1)(host)
    assert kept.sharding == pw.put(x, place.over("pinned_host")).sharding == host.sharding
    assert moved.sharding == from_host(place)(host).sharding == x.sharding
    np.testing.assert_array_equal(moved, 2 * X + 1)
    np.testing.assert_array_equal(kept, X + 1)
    np.testing.assert_array_equal(pw.jit(lambda x, y: x + y)(kept, host), 2 * X + 1)
    assert float(pw.jit(lambda x: x.sum())(kept)) == X.sum() + 8
    one = NamedSharding(mesh_on(1), P("x"), memory_kind="pinned_host")
    np.testing.assert_array_equal(pw.put(pw.put(kept, sharding=one), sharding=place.over()), X + 1)
