"""Checkpoints on disk: `checkpoint(tree, path=...)` and `restore`.

Hosts write and read the bytes of arrays; this process describes the tree (`pw.client.checkpoints.tree`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future
from numbers import Number
from typing import Any

import jax
import numpy as np

from pw.client.arrays.array import Array
from pw.client.arrays.joined import JoinedArray
from pw.client.arrays.mesh import OwnMesh, default_mesh
from pw.client.arrays.of_jax import own_sharding
from pw.client.arrays.sharding import OwnSharding
from pw.client.arrays.signature import ArrayType, aval_of, is_key, signature_of
from pw.client.checkpoints.tree import ANCHOR, SINGLE, Leaf, Tree, TreeNode, encode, host_leaf, read
from pw.client.functions.prefixes import spread
from pw.client.functions.transfer import put
from pw.client.functions.wrapped import tree_flatten, tree_unflatten, under_jax_trace
from pw.client.keywords import checks_keywords
from pw.core.errors import ArgumentError, NotOwner, ShardingError, TracerError
from pw.core.messages import Described, FileSource


def normal_path(path: Any) -> str:
    """Return the absolute path. Raises ArgumentError if it cannot be a checkpoint's."""
    text = os.fspath(path)
    if not isinstance(text, str) or "://" in text or not os.path.basename(os.path.abspath(text)):
        raise ArgumentError(
            f"{path!r} is no path for a checkpoint; it takes that of a directory on a file system that all "
            "hosts share"
        )
    return os.path.abspath(text)


def save(tree: Any, leaves: list[tuple[Any, Any]], path: Any, overwrite: bool) -> Future[None]:
    """Have the arrays among the leaves of a tree (with their JAX paths) written to disk."""
    where = normal_path(path)
    described: list[Leaf] = []
    names: dict[int, str] = {}
    moved: list[Array] = []  # until the hosts are asked: an array without a handle is deleted
    session = None
    for keys, leaf in leaves:
        key = jax.tree_util.keystr(keys)
        if isinstance(leaf, Array):
            leaf = _on_one_island(leaf)
            moved.append(leaf)
            session = leaf._runtime
            name = names.setdefault(leaf._id, key or SINGLE)
            type_ = leaf._type
            described.append(
                Leaf(
                    key,
                    name,
                    type_.spec.shape,
                    type_.spec.dtype,
                    type_.key_impl or "",
                    leaf.weak_type,
                )
            )
        else:
            described.append(host_leaf(key, leaf, "pw.checkpoint(path=...)"))
    if session is None:
        anchor = put(np.zeros((), np.bool_))
        session = anchor._runtime
        names[anchor._id] = ANCHOR
    if len(set(names.values())) != len(names):
        raise ArgumentError(
            "pw.checkpoint(path=...) was given a tree with the same path in it twice"
        )
    arrays = {name: number for number, name in names.items()}
    future: Future[None] = session.ask.save(
        where, overwrite, arrays, encode(Tree(described, TreeNode.of(tree)))
    )
    return future


@checks_keywords
def restore(path: Any, like: Any = None, *, sharding: Any = None) -> Any:
    """Bring a tree back from disk, onto any devices; returns futures at once.

    The hosts read what their shards need, whatever the sharding and the hosts it was written with. The arrays
    last as long as their files: when hosts are lost, they are read again.

    Args:
        path: the path of `pw.checkpoint`, which all hosts must see.
        like: a tree like the one that was written, or part of it, whose leaves say where arrays shall
            lie: `pw.NamedSharding`s, pw arrays, or `jax.ShapeDtypeStruct`s (with `sharding=`). Shapes and
            dtypes must be those on disk. Without it, the whole tree comes back: its dicts, lists, tuples and
            None as they were, and containers of other classes (named tuples, dataclasses) as dicts.
        sharding: a `pw.NamedSharding`, or a tree prefix of such, for leaves without a sharding. Other arrays go
            to a default slice of one device, as in `pw.put`, and host values stay host values; without `like`
            all of them do.

    Raises:
        CheckpointNotFound: there is no checkpoint at the path, as the hosts see it.
        CheckpointFailed: it cannot be read. Arrays raise it later, for files.
        ArgumentError: a leaf is not in it, or has another shape or dtype there.
        ShardingError: an array cannot be split that way.
    """
    where = normal_path(path)
    described = None
    is_whole = like is None
    if is_whole:
        mesh = _mesh_of(map(own_sharding, jax.tree_util.tree_leaves(sharding)))
        described = _look(where, mesh)
        like, keys = _tree_of(described, where)
    else:
        paths = jax.tree_util.tree_flatten_with_path(like)[0]
        keys = [jax.tree_util.keystr(path) for path, _ in paths]
    leaves, structure = tree_flatten(like)
    if under_jax_trace(leaves):
        raise TracerError("pw.restore was called in a function that JAX traces")
    wanted = list(map(_wanted, leaves, spread(sharding, like, "the sharding of pw.restore")))
    mesh = _mesh_of(wanted)
    session = mesh.runtime
    if any(entry is not None and entry.mesh.runtime is not session for entry in wanted):
        raise NotOwner("pw.restore was given shardings over devices of different sessions")
    described = described or _look(where, mesh)
    on_disk = {leaf.key: leaf for leaf in read(described, where).leaves}
    missing = [key for key in keys if key not in on_disk]
    if missing:
        raise ArgumentError(
            f"the checkpoint {where} has no {missing[0] or 'single array'}"
            f"{f' and {len(missing) - 1} others' if len(missing) > 1 else ''}; it has "
            f"{', '.join(list(on_disk)[:8])}{', ...' if len(on_disk) > 8 else ''}"
        )
    plans = []
    for key, leaf, target in zip(keys, leaves, wanted, strict=True):
        saved = on_disk[key]
        type_ = None
        if saved.in_files or not is_whole:
            type_ = _type_of(saved, leaf, target, where)
        plans.append((saved, type_))
    arrays: dict[tuple[str, ArrayType], Array] = {}
    results: list[Any] = []
    for saved, type_ in plans:
        if not saved.in_files:
            value = saved.value()
            results.append(value if type_ is None else put(value, sharding=type_.sharding))
            continue
        assert type_ is not None
        if (saved.array, type_) not in arrays:
            source = FileSource(where, described.checkpoint, saved.array)
            arrays[saved.array, type_] = _loaded(session, source, type_)
        results.append(arrays[saved.array, type_])
    return tree_unflatten(structure, results)


def _mesh_of(shardings: Iterable[Any]) -> OwnMesh:
    """Return the mesh of the first sharding, whose hosts are asked what is on disk."""
    first = next((one for one in shardings if isinstance(one, OwnSharding)), None)
    mesh = default_mesh() if first is None else first.mesh
    mesh.check_alive()
    return mesh


def _look(where: str, mesh: OwnMesh) -> Described:
    place = mesh.parts[0].placement if mesh.parts else mesh.placement
    described: Described = mesh.runtime.ask.look(where, place).result()
    return described


def _tree_of(described: Described, where: str) -> tuple[Any, list[str]]:
    """Return the tree on disk, with types in the places of arrays; and the key of each leaf."""
    saved = read(described, where)
    if len(saved.leaves) != saved.structure.count():
        raise ArgumentError(
            f"the checkpoint {where} does not say which containers its tree has: an earlier version of pw has "
            "written it. Call pw.restore with a tree like it"
        )
    numbers = saved.structure.tree(iter(range(len(saved.leaves))))
    keys = [saved.leaves[number].key for number in jax.tree_util.tree_leaves(numbers)]
    return jax.tree_util.tree_map(lambda number: saved.leaves[number].like(), numbers), keys


def _on_one_island(array: Array) -> Array:
    """Return an array that an island has whole; one that is split over islands moves to the first of them."""
    if not array._type.parts:
        return array
    for member, part in zip(array.members, array._type.islands, strict=True):
        if part.is_whole:
            return member
    moved: Array = put(array, sharding=array._type.islands[0].sharding.fitting(array.shape))
    return moved


def _loaded(session: Any, source: FileSource, type_: ArrayType) -> Array:
    """Return an array that hosts read; each island reads all of it, and keeps its part."""
    if not type_.parts:
        return Array(session, session.load(source, type_.spec), type_)
    source_type = type_
    if not all(part.is_whole for part in type_.islands):
        source_type = type_.with_sharding(OwnSharding.replicated(type_.sharding.mesh))
    parts = [Array(session, session.load(source, part.spec), part) for part in source_type.parts]
    joined: Array = put(JoinedArray(parts, source_type), sharding=type_.sharding)
    return joined


def _wanted(leaf: Any, default: Any) -> OwnSharding | None:
    """Return the sharding of a leaf: its own, or the default one."""
    own = leaf if isinstance(leaf, jax.sharding.Sharding) else getattr(leaf, "sharding", None)
    chosen = own_sharding(own) or default
    says = isinstance(leaf, (jax.sharding.Sharding, str, Number))
    if not (says or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))):
        raise ShardingError(
            f"pw.restore was given {leaf!r} in the place of an array. A leaf there is "
            "pw.NamedSharding(mesh, spec), an array, or a jax.ShapeDtypeStruct"
        )
    if chosen is not None and not isinstance(chosen, OwnSharding):
        raise ShardingError(f"pw.restore needs a pw.NamedSharding, not {chosen!r}")
    return chosen


def _type_of(saved: Leaf, leaf: Any, target: OwnSharding | None, where: str) -> ArrayType | None:
    """Return the type of the array to make of a leaf; None for a host value."""
    if saved.is_string:
        return None
    if isinstance(leaf, str):
        raise ArgumentError(
            f"pw.restore was given {leaf!r} in the place of {saved.key or 'the array'}, which is "
            f"{'a number' if saved.number is not None else 'an array'} in the checkpoint {where}"
        )
    if saved.in_files and target is None:
        target = OwnSharding.replicated(default_mesh())
    if saved.number is not None:
        aval = aval_of(signature_of(saved.value()))
    else:
        aval = saved.aval()
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if not isinstance(leaf, jax.sharding.Sharding) and shape is not None and dtype is not None:
        if saved.number is None and (tuple(shape), _name(dtype)) != (aval.shape, _name(aval.dtype)):
            raise ArgumentError(
                f"{saved.key or 'the array'} is {_name(aval.dtype)}{list(aval.shape)} in the checkpoint "
                f"{where}, not {_name(dtype)}{list(shape)}"
            )
        if isinstance(leaf, (Array, jax.ShapeDtypeStruct)):
            aval = jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=leaf.weak_type)
    return None if target is None else ArrayType.of(aval, target)


def _name(dtype: Any) -> str:
    return str(dtype) if is_key(dtype) else np.dtype(dtype).name
