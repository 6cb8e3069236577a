"""`pw.lookup`: the arrays of a name, where they lie or elsewhere."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pw.client.arrays.array import Array
from pw.client.arrays.devices import Slice
from pw.client.arrays.joined import JoinedArray
from pw.client.arrays.sharding import OwnSharding, PartitionSpec
from pw.client.connection import current
from pw.client.functions.prefixes import spread
from pw.client.functions.transfer import put
from pw.client.functions.wrapped import under_jax_trace
from pw.client.keywords import checks_keywords
from pw.client.sharing.description import Devices, read
from pw.core.errors import ArgumentError, InsufficientDevices, ShardingError, TracerError
from pw.core.messages import SharedPart, VersionOffer

TRIES = 3
"""Number of lookups while hosts are being lost."""

_slices: weakref.WeakKeyDictionary[Any, weakref.WeakValueDictionary[int, Slice]] = (
    weakref.WeakKeyDictionary()
)
"""Slices of each session on the devices of published arrays, by the number of the name's slice."""

_in_jax: dict[int, int] = {}
"""Numbers of the versions of which `jax.Array`s are, by the id of the array."""


@checks_keywords
def lookup(
    name: str,
    *,
    version: int | None = None,
    after: int | None = None,
    like: Any = None,
    wait: float = 0.0,
) -> Any:
    """Return the tree that was published under a name, as arrays of this session.

    Without `like`, no bytes move: the arrays are views of the published shards, on the devices where these
    lie, so they lie in memory once. With `like`, only the shards that it asks for travel, straight from the
    hosts that have them. All arrays are of one version. It is in order with computations and publications of
    this session: after a `pw.publish` here it finds that version, and waits for it.

    The arrays are read-only: a computation that donates one of them raises. They last as long as this session
    has them, also when newer versions are published, the name ends, or its publisher leaves. If hosts are
    lost, they are brought back like every other array, as long as the publisher, or replicas, can make them
    again.

    Args:
        name: the name, of this session's tenant; `tenant/name` for that of another tenant.
        version: number of the version; None for the newest.
        after: only a version with a higher number, as in `after=pw.version_of(weights)`.
        like: a `pw.NamedSharding`, or a tree prefix of such or of arrays, that say where each array is to lie.
            None in it leaves arrays where they are.
        wait: seconds to wait until there is such a version.

    Raises:
        NameNotFound: nothing that this session may read is published under the name, or not this version.
        ArgumentError: an argument is none, or `like` does not fit the tree.
        ShardingError: an array cannot be split as `like` says, or an entry of it is no place.
        TracerError: JAX traces the function that calls it, and there is a `like`.
        InsufficientDevices: the devices of the arrays are away.
    """
    return looked_up(name, version, after, like, wait, lambda slice_: slice_.devices)


def looked_up(
    name: str, version: Any, after: Any, like: Any, wait: Any, place: Callable[[Slice], Devices]
) -> Any:
    """Look a name up, for arrays on the devices that `place` returns for a slice; see `lookup`."""
    _check(name, version, after, wait)
    session = current.runtime()
    for left in reversed(range(TRIES)):
        offer: VersionOffer = session.ask.look_up(
            name, version or 0, after or 0, float(wait)
        ).result()
        try:
            slices = [_slice(session, part) for part in offer.parts]
            break
        except InsufficientDevices:
            if not left:
                raise
    shared, types, parts = read(offer.tree, [place(slice_) for slice_ in slices])
    members: list[list[Array]] = []
    for part, own in zip(offer.parts, parts, strict=True):
        ordered = [own[index] for index in range(len(own))]
        numbers = session.handovers.take(part.token, [type_.spec for type_ in ordered])
        arrays = [
            Array(session, number, type_) for number, type_ in zip(numbers, ordered, strict=True)
        ]
        members.append([_read_only(array, offer) for array in arrays])
    leaves: list[Any] = []
    for leaf, type_ in zip(shared.leaves, types, strict=True):
        if type_ is None:
            leaves.append(leaf.value())
            continue
        views = [members[part][index] for part, index in leaf.members]
        leaves.append(JoinedArray(views, type_) if type_.parts else views[0])
    tree = shared.structure.tree(iter(leaves))
    return tree if like is None else _moved(tree, like, offer)


def version_of(tree: Any) -> int:
    """Return the number of the version of which `pw.lookup` has returned this tree, or an array in it.

    Raises:
        ArgumentError: no array in the tree is of a lookup.
    """
    for leaf in jax.tree_util.tree_leaves(tree):
        if isinstance(leaf, Array):
            version = leaf._runtime.read_only.get(leaf.members[0]._id)
            if version is not None:
                return int(version[1])
        elif id(leaf) in _in_jax:
            return _in_jax[id(leaf)]
    raise ArgumentError(
        "pw.version_of takes what pw.lookup has returned, or an array of it; where a tree has no arrays, "
        "pw.names()[name].version says it"
    )


def note_in_jax(tree: Any, version: int) -> None:
    """Note of which version JAX's arrays in a tree are."""
    for leaf in jax.tree_util.tree_leaves(tree):
        if isinstance(leaf, jax.Array):
            _in_jax[id(leaf)] = version
            weakref.finalize(leaf, _in_jax.pop, id(leaf), None)


def _check(name: Any, version: Any, after: Any, wait: Any) -> None:
    if not isinstance(name, str) or not name:
        raise ArgumentError(
            f"pw.lookup takes a name, such as 'base' or 'tenant/base', not {name!r}"
        )
    for what, number, least in (("version", version, 1), ("after", after, 0)):
        if number is not None and (
            not isinstance(number, int) or isinstance(number, bool) or number < least
        ):
            raise ArgumentError(f"{what}={number!r} is no number of a version, which count from 1")
    if isinstance(wait, bool) or not isinstance(wait, (int, float)) or not wait >= 0:
        raise ArgumentError(f"wait={wait!r} is no number of seconds")


def _slice(session: Any, part: SharedPart) -> Slice:
    """Return this session's slice on the devices of a part."""
    own = _slices.setdefault(session, weakref.WeakValueDictionary())
    slice_ = own.get(part.slice)
    if slice_ is None:
        bound = session.allocate_slice(part.devices, like=part.slice)
        slice_ = own[part.slice] = Slice(session, bound)
    return slice_


def _read_only(array: Array, offer: VersionOffer) -> Array:
    """Note that an array is published: no computation may take its memory."""
    read_only = array._runtime.read_only
    read_only[array._id] = offer.name, offer.version
    weakref.finalize(array, read_only.pop, array._id, None)
    return array


def _moved(tree: Any, like: Any, offer: VersionOffer) -> Any:
    """Put the arrays of a tree where `like` says."""
    entries, structure = jax.tree_util.tree_flatten_with_path(tree)
    if under_jax_trace([leaf for _, leaf in entries]):
        raise TracerError(
            "pw.lookup(like=) was called in a function that JAX traces; look the name up before, and pass "
            "the arrays"
        )
    like = jax.tree_util.tree_map(
        lambda one: one.sharding if isinstance(one, (Array, jax.Array)) else one, like
    )
    targets: Sequence[Any] = spread(like, tree, "like= of pw.lookup")
    results = []
    for (keys, leaf), target in zip(entries, targets, strict=True):
        if not isinstance(leaf, Array) or target is None:
            results.append(leaf)
            continue
        where = f"like= of pw.lookup({offer.name!r}), at {jax.tree_util.keystr(keys) or 'the top'}"
        if not isinstance(target, OwnSharding):
            raise ShardingError(f"{where}, has {_no_place(target)}")
        try:
            moved = put(leaf, sharding=target)
        except ShardingError as error:
            raise ShardingError(f"{where}: {error}") from None
        if moved is not leaf:
            for member in moved.members:
                _read_only(member, offer)
        results.append(moved)
    return jax.tree_util.tree_unflatten(structure, results)


def _no_place(target: Any) -> str:
    """Return why an entry of `like` is no place for an array."""
    if isinstance(target, PartitionSpec):
        return f"{target}, without devices; pass pw.NamedSharding(mesh, {target})"
    return f"{target!r}; it takes a pw.NamedSharding, or an array that lies on virtual devices"
