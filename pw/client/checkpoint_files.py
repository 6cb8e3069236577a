"""Checkpoints on disk: `checkpoint(tree, path=...)` and `restore`.

Hosts write and read the bytes of arrays; this process describes the tree. A *leaf* of that
description is an
array, by its JAX path in the tree, or a host value: numbers and small host arrays are in the description.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import Future
from typing import Any

import jax
import msgspec
import numpy as np

from pw.client.arrays.array import Array
from pw.client.arrays.joined import JoinedArray
from pw.client.arrays.mesh import default_mesh
from pw.client.arrays.sharding import NamedSharding
from pw.client.arrays.signature import ArrayType, aval_of, is_key, key_impl_of, signature_of
from pw.client.trace.function import tree_flatten, tree_unflatten, under_jax_trace
from pw.client.trace.prefixes import spread
from pw.client.trace.tracer import ProgramTracer
from pw.client.transfer import put
from pw.core.errors import ArgumentError, CheckpointFailed, NotOwner, ShardingError, TracerError
from pw.core.messages import INLINE_BYTES, Described, FileSource
from pw.core.sharding import dtype_of

_NUMBERS: dict[str, Any] = {kind.__name__: kind for kind in (int, float, complex)}

SINGLE = "array"
"""The name of an array that is a whole checkpoint."""


class _Leaf(msgspec.Struct, frozen=True, omit_defaults=True):
    """One leaf of a tree on disk: the name of an array, or a host value."""

    key: str
    """Its JAX path."""
    array: str = ""
    """Name of the array; several leaves may be the same array."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    """Dtype of the elements; of typed keys, that of their integers."""
    prng: str = ""
    """The generator of typed keys."""
    weak: bool = False
    number: tuple[str, str] | None = None
    """A Python number: its type, and its repr."""
    data: bytes | None = None
    """The elements of a small host array."""

    @property
    def in_files(self) -> bool:
        """Whether it is an array on disk."""
        return bool(self.array)

    def check(self) -> None:
        """Raise one of `_UNREADABLE` unless it has a value."""
        if self.number is None:
            size_bytes = math.prod(self.shape) * dtype_of(self.dtype).itemsize
            if min(self.shape, default=0) < 0:
                raise ValueError(f"{self.key!r} has the shape {self.shape}")
            if not self.in_files and size_bytes != len(self.data or b""):
                raise ValueError(f"{self.key!r} does not have {size_bytes} bytes")
        if self.in_files:
            self.aval()
        else:
            self.value()

    def aval(self) -> Any:
        """Return its abstract value."""
        data = jax.ShapeDtypeStruct(self.shape, dtype_of(self.dtype))
        if self.prng:
            data = jax.eval_shape(lambda x: jax.random.wrap_key_data(x, impl=self.prng), data)
        return jax.core.ShapedArray(data.shape, data.dtype, weak_type=self.weak)

    def value(self) -> Any:
        """Return the host value."""
        if self.number is not None:
            kind, text = self.number
            return text == "True" if kind == "bool" else _NUMBERS[kind](text)
        if self.data is None:
            raise ValueError(f"{self.key!r} has no value")
        value: Any = np.empty(self.shape, dtype_of(self.dtype))
        value.reshape(-1).view(np.uint8)[:] = np.frombuffer(self.data, np.uint8)
        return jax.random.wrap_key_data(value, impl=self.prng) if self.prng else value[()]


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[_Leaf]).decode


def normal_path(path: Any) -> str:
    """Return the absolute path. Raises ArgumentError if it cannot be a checkpoint's."""
    text = os.fspath(path)
    if not isinstance(text, str) or "://" in text or not os.path.basename(os.path.abspath(text)):
        raise ArgumentError(
            f"{path!r} is no path for a checkpoint; it takes that of a directory on a file system that all "
            "hosts share"
        )
    return os.path.abspath(text)


def save(leaves: list[tuple[Any, Any]], path: Any, overwrite: bool) -> Future[None]:
    """Have the arrays among these leaves of a tree (with their JAX paths) written to disk."""
    where = normal_path(path)
    described: list[_Leaf] = []
    names: dict[int, str] = {}
    session = None
    for keys, leaf in leaves:
        key = jax.tree_util.keystr(keys)
        if isinstance(leaf, Array):
            leaf = _on_one_island(leaf)
            session = leaf._runtime
            name = names.setdefault(leaf._id, key or SINGLE)
            type_ = leaf._type
            described.append(
                _Leaf(
                    key,
                    name,
                    type_.spec.shape,
                    type_.spec.dtype,
                    type_.key_impl or "",
                    leaf.weak_type,
                )
            )
        else:
            described.append(_host_leaf(key, leaf))
    if session is None:
        raise ArgumentError(
            "pw.checkpoint(path=...) was given no pw array, so there is nothing that hosts could write"
        )
    if len(set(names.values())) != len(names):
        raise ArgumentError(
            "pw.checkpoint(path=...) was given a tree with the same path in it twice"
        )
    arrays = {name: number for number, name in names.items()}
    future: Future[None] = session.ask.save(where, overwrite, arrays, _encode(described))
    return future


def _host_leaf(key: str, leaf: Any) -> _Leaf:
    if isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic):
        kind: Any = next(k for k in (bool, int, float, complex) if isinstance(leaf, k))
        return _Leaf(key, number=(kind.__name__, repr(kind(leaf))))
    dtype = aval_of(signature_of(leaf)).dtype
    prng = key_impl_of(dtype) or ""
    value = np.asarray(jax.random.key_data(leaf) if prng else leaf)
    if value.nbytes > INLINE_BYTES:
        raise ArgumentError(
            f"the array of {value.nbytes} bytes at {key or 'the top'} is in this process, and arrays are "
            "written by the hosts that have them: put it on devices first, with pw.put"
        )
    return _Leaf(key, "", value.shape, value.dtype.name, prng, data=value.tobytes())


def restore(path: Any, like: Any, *, sharding: Any = None) -> Any:
    """Bring a tree back from disk, onto any devices; returns futures at once.

    The hosts read what their shards need, whatever the sharding and the hosts it was written with.
    The
    arrays last as long as their files: when hosts are lost, they are read again.

    Args:
        path: the path of `pw.checkpoint`, which all hosts must see.
        like: a tree like the one that was written, or part of it, whose leaves say where arrays shall
            lie: `pw.NamedSharding`s, pw arrays, or `jax.ShapeDtypeStruct`s (with `sharding=`). Shapes and
            dtypes must be those on disk.
        sharding: for leaves without a sharding; a `pw.NamedSharding`, or a tree prefix of such. Other arrays go
            to a default slice of one device, as in `pw.put`, and host values stay host values.

    Raises:
        CheckpointNotFound: there is no checkpoint at the path, as the hosts see it.
        CheckpointFailed: it cannot be read. Arrays raise it later, for files.
        ArgumentError: a leaf is not in it, or has another shape or dtype there.
        ShardingError: an array cannot be split that way.
    """
    where = normal_path(path)
    leaves, structure = tree_flatten(like)
    keys = [jax.tree_util.keystr(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(like)[0]]
    if under_jax_trace(leaves):
        raise TracerError("pw.restore was called in a function that JAX traces")
    wanted = [
        _wanted(leaf, given)
        for leaf, given in zip(
            leaves, spread(sharding, like, "the sharding of pw.restore"), strict=True
        )
    ]
    first = next((entry for entry in wanted if entry is not None), None)
    mesh = default_mesh() if first is None else first.mesh
    mesh.check_alive()
    session = mesh.runtime
    if any(entry is not None and entry.mesh.runtime is not session for entry in wanted):
        raise NotOwner("pw.restore was given shardings over devices of different sessions")
    place = mesh.parts[0].placement if mesh.parts else mesh.placement
    described: Described = session.ask.look(where, place).result()
    on_disk = {leaf.key: leaf for leaf in _leaves(described, where)}
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
        plans.append((saved, _type_of(saved, leaf, target, where)))
    made: dict[tuple[str, int], Array] = {}
    restored: list[Any] = []
    for saved, type_ in plans:
        if not saved.in_files:
            value = saved.value()
            restored.append(value if type_ is None else put(value, sharding=type_.sharding))
            continue
        assert type_ is not None
        array = made.get((saved.array, id(type_)))
        if array is None:
            source = FileSource(where, described.checkpoint, saved.array)
            array = _loaded(session, source, type_)
            made[saved.array, id(type_)] = array
        restored.append(array)
    return tree_unflatten(structure, restored)


def _on_one_island(array: Array) -> Array:
    """Return an array that an island has whole; one that is split over islands moves to the first of them."""
    if not array._type.parts:
        return array
    if array.sharding.crossing_dimension is None:
        return array.members[0]
    moved: Array = put(array, sharding=array.sharding.on_island(0))
    return moved


def _loaded(session: Any, source: FileSource, type_: ArrayType) -> Array:
    """Return an array that hosts read; each island reads all of it, and keeps its part."""
    if not type_.parts:
        return Array(session, session.load(source, type_.spec), type_)
    wanted = type_.sharding
    whole = type_.with_sharding(NamedSharding.replicated(wanted.mesh))
    if wanted.crossing_dimension is None:
        whole = type_
    parts = [Array(session, session.load(source, part.spec), part) for part in whole.parts]
    joined: Array = put(JoinedArray(parts, whole), sharding=wanted)
    return joined


_UNREADABLE = (
    msgspec.MsgspecError, ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError,
    ValueError,
)  # fmt: skip
"""What numpy, JAX and msgspec raise for descriptions that are no array and no number."""


def _leaves(described: Described, where: str) -> list[_Leaf]:
    """Return the leaves of a tree on disk. Raises CheckpointFailed if one of them is nothing that pw writes."""
    try:
        leaves = _decode(described.tree)
        for leaf in leaves:
            leaf.check()
    except _UNREADABLE as error:
        raise CheckpointFailed(f"the tree in {where} cannot be read: {error}") from None
    return leaves


def single_tree(shape: tuple[int, ...], dtype: str) -> bytes:
    """Describe a tree that is one array, called `SINGLE` in the files."""
    return _encode([_Leaf("", SINGLE, shape, dtype)])


def single_in(described: Described, where: str) -> tuple[tuple[int, ...], str]:
    """Return the shape and dtype of the array in a checkpoint of one array. Raises CheckpointFailed."""
    leaves = _leaves(described, where)
    if len(leaves) != 1 or leaves[0].array != SINGLE:
        raise CheckpointFailed(f"the checkpoint {where} is a tree, not one array: use pw.restore")
    return leaves[0].shape, leaves[0].dtype


def _wanted(leaf: Any, given: Any) -> NamedSharding | None:
    """Return the wanted sharding of a leaf."""
    if isinstance(leaf, ProgramTracer):
        leaf._needed("pw.restore()")
    own = leaf if isinstance(leaf, NamedSharding) else getattr(leaf, "sharding", None)
    chosen = own if isinstance(own, NamedSharding) else given
    if chosen is not None and not isinstance(chosen, NamedSharding):
        raise ShardingError(f"pw.restore needs a pw.NamedSharding, not {chosen!r}")
    return chosen


def _type_of(saved: _Leaf, leaf: Any, target: NamedSharding | None, where: str) -> ArrayType | None:
    """Return the type of the array to make of a leaf; None for a host value."""
    if saved.in_files and target is None:
        target = NamedSharding.replicated(default_mesh())
    if saved.number is not None:
        aval = aval_of(signature_of(saved.value()))
    else:
        aval = saved.aval()
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if not isinstance(leaf, NamedSharding) and shape is not None and dtype is not None:
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
