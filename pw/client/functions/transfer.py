"""`put`, `get`, `ready` and `block_until_ready`: between this process and devices.

Small values travel inside the run of an identity program; large ones are uploaded to their hosts. A
move from one sharding to another is an identity program too, so the bytes go from host to host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import pw.client.functions.function  # noqa: F401 - compiles the operators of what is put
from pw.client.arrays import jax_arrays
from pw.client.arrays.array import Array
from pw.client.arrays.joined import JoinedArray, uploaded
from pw.client.arrays.mesh import default_mesh, mesh_of
from pw.client.arrays.of_jax import own_sharding
from pw.client.arrays.ragged import Ragged, check_counts, check_pairs, pairs_of
from pw.client.arrays.sharding import OwnSharding, PartitionSpec
from pw.client.arrays.signature import ArrayType, aval_of, host_value, signature_of
from pw.client.connection.waiting import time_left
from pw.client.display.live import Together
from pw.client.equations.calls import program_trace
from pw.client.equations.counted_rows import with_counts
from pw.client.functions.prefixes import spread
from pw.client.functions.wrapped import tree_flatten, tree_unflatten, under_jax_trace
from pw.client.keywords import checks_keywords
from pw.client.programs.writing.builder import ProgramBuilder
from pw.client.programs.writing.launch import Launch
from pw.core.errors import ShardingError, TracerError
from pw.core.messages import INLINE_BYTES
from pw.core.sharding import ArraySpec

UPLOADED_ONCE_BYTES = 1 << 20
"""A value from this size on that more than two islands take whole is uploaded to one, and moved from there."""


@checks_keywords
def put(tree: Any, devices: Any = None, *, sharding: Any = None, keep: bool = False) -> Any:
    """Put host values, or arrays of other devices, on virtual devices; returns futures at once.

    Args:
        tree: tree of numbers, numpy arrays, jax arrays or pw arrays.
        devices: a virtual device, a slice, or several devices of one slice, each to hold a full copy; or, as
            in `jax.device_put`, a value for `sharding`.
        sharding: a `pw.NamedSharding` (or, together with `devices`, a PartitionSpec over their axis
            "devices"), or a tree prefix of such. With neither, arrays stay where they are and host
            values go to a default slice of one device. `memory_kind="pinned_host"` puts shards in the memory of
            the hosts; a sharding without a kind in that of the devices.
        keep: keep host values in this process's memory for as long as arrays depend on them, so that they
            survive any loss of hosts. Otherwise they are kept within the session's budget (see `pw.connect`).

    Raises:
        ShardingError: a value cannot be split that way.
        ArgumentError: a `pw.Ragged` of this process has counts that are negative, or more than its rows.
        ArrayDeleted: an array was deleted or donated.
    """
    leaves, structure = tree_flatten(tree)
    program = program_trace()
    if under_jax_trace(leaves) and program is None:
        raise TracerError(
            "pw.put was called in a function that JAX traces; there, "
            "jax.lax.with_sharding_constraint says how a value is to lie"
        )
    if sharding is None and _are_shardings(devices):
        devices, sharding = None, devices
    mesh = None if devices is None else mesh_of(devices)
    wanted: list[OwnSharding | None] = []
    for entry in spread(sharding, tree, "the sharding of pw.put"):
        if isinstance(entry, PartitionSpec):
            if mesh is None:
                raise ShardingError(
                    f"pw.put was given {entry} without devices; pass pw.NamedSharding(mesh, {entry})"
                )
            wanted.append(OwnSharding(mesh, entry))
        elif entry is not None and not isinstance(entry, OwnSharding):
            raise ShardingError(f"pw.put needs a pw.NamedSharding, not {entry!r}")
        elif entry is not None and mesh is not None and entry.mesh._devices != mesh._devices:
            raise ShardingError("pw.put was given a sharding over other devices than devices=")
        else:
            wanted.append(entry or (None if mesh is None else OwnSharding.replicated(mesh)))
    if program is not None:
        moved = [_moved(leaf, target) for leaf, target in zip(leaves, wanted, strict=True)]
        moved = with_counts(moved, structure)
        return tree_unflatten(structure, moved)
    leaves = jax_arrays.from_jax(leaves)
    for rows, counts in pairs_of(structure):
        check_counts(leaves[counts], leaves[rows], "pw.put")
    together: dict[int, Array] = {}
    for rows, counts in pairs_of(structure):
        target = wanted[rows]
        if target is not None and _moves_by_count(leaves[rows], target):
            pair = _put_ragged(leaves[rows], leaves[counts], target, wanted[counts] or target)
            together[rows], together[counts] = pair
    moved = [
        together[at] if at in together else _put(leaf, target, keep)
        for at, (leaf, target) in enumerate(zip(leaves, wanted, strict=True))
    ]
    return tree_unflatten(structure, moved)


def _moved(leaf: Any, target: OwnSharding | None) -> Any:
    """Put a value of a program that JAX traces; host values without a place go to a default slice."""
    if target is None:
        if isinstance(leaf, (Array, jax.core.Tracer)):
            return leaf
        target = OwnSharding.replicated(default_mesh())
    if isinstance(leaf, np.ndarray):  # its owner may write to it before it is used
        leaf = leaf.copy()
    target.core.check(np.shape(leaf))
    return jax.device_put(leaf, target)


def _are_shardings(devices: Any) -> bool:
    leaves, _ = tree_flatten(devices)
    return bool(leaves) and None not in map(own_sharding, leaves)


def _put(leaf: Any, target: OwnSharding | None, keep: bool) -> Any:
    if target is None:
        if isinstance(leaf, Array):
            leaf._check_usable()
            return leaf
        target = OwnSharding.replicated(default_mesh())
    target.mesh.check_alive()
    session = target.mesh.runtime
    if isinstance(leaf, Array):
        leaf._check_owner(session)
        source: Any = leaf._type
        type_ = source.with_sharding(target)
        if type_ is source:
            return leaf
        if isinstance(leaf, JoinedArray) and leaf.has_lost:
            survivor = leaf.surviving(target.mesh.slice.island)
            if survivor is not None and type_.parts and all(one.is_whole for one in type_.islands):
                return JoinedArray([_put(leaf, to.sharding, keep) for to in type_.parts], type_)
            if survivor is not None:
                return _put(survivor, target, keep)
    else:
        source = aval_of(signature_of(leaf))
        type_ = ArrayType.of(source, target)
        value = host_value(leaf, type_)
        if value.nbytes > INLINE_BYTES:
            if type_.parts and type_.size_bytes >= UPLOADED_ONCE_BYTES and _is_relayed(type_):
                first = uploaded(session, value, type_.parts[0], keep=keep)
                return _put(first, type_.sharding, keep)
            return uploaded(session, value, type_, keep=keep)

    def make() -> Launch:
        move = ProgramBuilder("pw.put")
        return move.finish([move.reshard(move.leaf(0, source), target)])

    return target.mesh.slice.compiled.get_or_make(("put", source, type_), make)([leaf])[0]


def device_put(
    values: Sequence[Any], devices: Sequence[Any], copy_semantics: Sequence[Any]
) -> list[Any]:
    """Do what `jax.device_put` was called for outside of traced functions: `put` moves the values.

    Args:
        values: the leaves.
        devices: for each a sharding over virtual devices, or the space of a memory of its own devices.
        copy_semantics: for each, whether JAX's caller gives it away or wants a copy.

    Raises:
        ShardingError: a target has no virtual devices.
    """
    targets = [
        value._type.sharding.in_space(target)
        if isinstance(value, Array) and isinstance(target, jax.memory.Space)
        else own_sharding(target)
        for value, target in zip(values, devices, strict=True)
    ]
    if None in targets:
        raise ShardingError(
            "jax.device_put was given virtual devices for some values and none for others; call it once for "
            "each kind of devices"
        )
    moved: list[Any] = put(list(values), sharding=targets)
    for at, how in enumerate(copy_semantics):
        if how.name == "DONATE_INPUT" and isinstance(values[at], Array):
            if moved[at] is not values[at]:
                values[at].delete()
        elif how.name == "ALWAYS_COPY" and moved[at] is values[at]:
            moved[at] = moved[at].copy()
    return moved


def _moves_by_count(rows: Any, target: OwnSharding) -> bool:
    """Whether these rows of a `Ragged` go from devices to other ones, or are sharded another way."""
    if not isinstance(rows, Array) or rows._type.parts or target.mesh.parts:
        return False
    return rows._type.with_sharding(target) is not rows._type


def _put_ragged(
    rows: Array, counts: Any, target: OwnSharding, counts_target: OwnSharding
) -> list[Array]:
    """Move rows that count, and their counts, in one run."""
    session = target.mesh.runtime
    rows._check_owner(session)
    if not isinstance(counts, Array):
        counts = _put(counts, OwnSharding.replicated(rows._type.sharding.mesh), False)
    types = rows._type, counts._type
    targets = types[0].with_sharding(target), types[1].with_sharding(counts_target)

    def make() -> Launch:
        move, (pair, tree) = ProgramBuilder("pw.put"), tree_flatten(Ragged(*types))
        check_pairs(pairs_of(tree), [type_.aval for type_ in types], "pw.put")
        results = [
            move.reshard(move.leaf(at, type_), to.sharding)
            for at, (type_, to) in enumerate(zip(pair, targets, strict=True))
        ]
        return move.finish(results, tree)

    launch: Launch = target.mesh.slice.compiled.get_or_make(("put ragged", types, targets), make)
    return launch([rows, counts])


def _is_relayed(type_: ArrayType) -> bool:
    """Whether more than two islands take an array whole."""
    return len(type_.parts) > 2 and all(part.is_whole for part in type_.islands)


@checks_keywords
def get(tree: Any, timeout: float | None = None) -> Any:
    """Fetch values: return the tree with numpy arrays (jax arrays for typed keys).

    All fetches overlap. Other leaves stay as they are, but for jax arrays on virtual devices.

    Args:
        tree: arrays, in any containers that JAX knows.
        timeout: how long to wait for all `pw` arrays together, in seconds; without end if None.

    Raises:
        Error: the error of an array that has failed.
        TimeoutError: not all values have come in time. From a timeout of 0.5 s on it says why, as `pw.why()`;
            the arrays stay as they are, and may be fetched again.
        ArgumentError: `timeout` is no number of seconds.
    """
    left_s = time_left(timeout)
    leaves, structure = tree_flatten(tree)
    leaves = [jax.device_get(leaf) if jax_arrays.is_remote(leaf) else leaf for leaf in leaves]
    fetching = []
    for leaf in leaves:
        if isinstance(leaf, jax.core.Tracer):
            np.asarray(leaf)  # raises JAX's error
        if isinstance(leaf, Array):
            fetching.append(leaf.start_fetch())
    with Together(fetching):
        return tree_unflatten(
            structure,
            [leaf.local(left_s(), timeout) if isinstance(leaf, Array) else leaf for leaf in leaves],
        )


async def ready(tree: Any) -> Any:
    """`block_until_ready` for asyncio: `await pw.ready(tree)`, `asyncio.gather(pw.ready(x), ...)`.

    A task that is cancelled ends its wait only: the computations go on, and later ones on these devices wait
    for them. `pw.cancel(tree)` ends them.

    Raises:
        Error: the error of the first array that has failed.
    """
    for leaf in tree_flatten(tree)[0]:
        if isinstance(leaf, Array):
            await leaf
    return tree


@checks_keywords
def block_until_ready(tree: Any, timeout: float | None = None) -> Any:
    """Wait until all arrays of a tree exist on their devices; returns the tree.

    Args:
        tree: arrays, in any containers that JAX knows.
        timeout: how long to wait for all `pw` arrays together, in seconds; without end if None.

    Raises:
        Error: the error of the first array that has failed.
        TimeoutError: not all arrays are there in time. From a timeout of 0.5 s on it says why, as `pw.why()`.
        ArgumentError: `timeout` is no number of seconds.
    """
    left_s = time_left(timeout)
    waiting: dict[int, tuple[Any, list[tuple[int, ArraySpec]]]] = {}
    for leaf in tree_flatten(tree)[0]:
        if isinstance(leaf, Array):
            leaf._check_usable()
            session = leaf._runtime
            arrays = waiting.setdefault(id(session), (session, []))[1]
            arrays += [(member._id, member._type.spec) for member in leaf.members]
        elif isinstance(leaf, jax.Array):
            leaf.block_until_ready()
    for session, arrays in waiting.values():
        session.wait(arrays).result(left_s(), timeout)
    return tree
