"""The description of a tree in a checkpoint on disk: its containers, and its leaves.

A leaf is an array, by its JAX path in the tree, or a host value: numbers, strings and small host arrays are
in the description.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import jax
import msgspec
import numpy as np

from pw.client.arrays.signature import aval_of, key_impl_of, signature_of
from pw.core.errors import ArgumentError, CheckpointFailed
from pw.core.messages import INLINE_BYTES, Described
from pw.core.sharding import dtype_of

_NUMBERS: dict[str, Any] = {kind.__name__: kind for kind in (int, float, complex)}

SINGLE = "array"
"""The name of an array that is a whole checkpoint."""
ANCHOR = "pw: no array"
"""The name of the array in a checkpoint of a tree without arrays: a host must write the description."""


class Leaf(msgspec.Struct, frozen=True, omit_defaults=True):
    """One leaf of a tree on disk: the name of an array, or a host value."""

    key: str
    """JAX path of the leaf in the tree."""
    array: str = ""
    """Name of the array; several leaves may be the same array."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    """Dtype of the elements; of typed keys, that of their integers."""
    prng: str = ""
    """The generator of typed keys."""
    weak: bool = False
    number: tuple[str, str] | None = None
    """A Python number: its type, and its repr; or a string, after the type `str`."""
    data: bytes | None = None
    """The elements of a small host array."""

    @property
    def in_files(self) -> bool:
        """Whether it is an array on disk."""
        return bool(self.array)

    @property
    def is_string(self) -> bool:
        """Whether it is a Python string."""
        return self.number is not None and self.number[0] == "str"

    def like(self) -> Any:
        """Return what stands for it in the tree that `restore` is given: its type, or its value."""
        if not self.in_files:
            return self.value()
        aval = self.aval()
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)

    def check(self) -> None:
        """Raise one of `UNREADABLE` unless it has a value."""
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
            if kind == "str":
                return text
            return text == "True" if kind == "bool" else _NUMBERS[kind](text)
        if self.data is None:
            raise ValueError(f"{self.key!r} has no value")
        value: Any = np.empty(self.shape, dtype_of(self.dtype))
        value.reshape(-1).view(np.uint8)[:] = np.frombuffer(self.data, np.uint8)
        return jax.random.wrap_key_data(value, impl=self.prng) if self.prng else value[()]


class TreeNode(msgspec.Struct, frozen=True, omit_defaults=True):
    """A container of a tree, or a leaf."""

    kind: Literal["leaf", "none", "dict", "list", "tuple"] = "leaf"
    children: list[TreeNode] = []
    keys: list[str | int] = []
    """Keys of a dict, one for each child."""

    @classmethod
    def of(cls, tree: Any) -> TreeNode:
        """Describe a tree. Containers of other classes are dicts of their fields."""
        if tree is None:
            return cls("none")
        entries = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]
        if entries and not entries[0][0]:
            return cls()
        children = [cls.of(child) for _, child in entries]
        if type(tree) in (list, tuple):
            return cls("list" if type(tree) is list else "tuple", children)
        return cls("dict", children, [_name_of(path[0]) for path, _ in entries])

    def count(self) -> int:
        """Return the number of leaves."""
        return sum(child.count() for child in self.children) + (self.kind == "leaf")

    def tree(self, leaves: Iterator[Any]) -> Any:
        """Return the tree with these leaves, in JAX's order."""
        if self.kind == "leaf":
            return next(leaves)
        children = [child.tree(leaves) for child in self.children]
        if self.kind == "dict":
            return dict(zip(self.keys, children, strict=True))
        return {"none": None, "list": children, "tuple": tuple(children)}[self.kind]


def _name_of(key: Any) -> str | int:
    """Return the name of an entry of a container, by its JAX key."""
    name = getattr(key, "key", getattr(key, "name", getattr(key, "idx", None)))
    return name if isinstance(name, (str, int)) else str(name)


class Tree(msgspec.Struct, frozen=True):
    """The description of a tree on disk."""

    leaves: list[Leaf]
    structure: TreeNode = TreeNode()


encode = msgspec.json.Encoder().encode
# Earlier versions of pw wrote a list.
_decode: Any = msgspec.json.Decoder(Tree | list[Leaf]).decode


UNREADABLE = (
    msgspec.MsgspecError, ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError,
    ValueError,
)  # fmt: skip
"""Errors of numpy, JAX and msgspec for descriptions that are no array and no number."""


def read(described: Described, where: str) -> Tree:
    """Return the description of a tree on disk. Raises CheckpointFailed if it is nothing that pw writes."""
    try:
        tree: Tree | list[Leaf] = _decode(described.tree)
        if isinstance(tree, list):
            tree = Tree(tree, TreeNode("none"))
        for leaf in tree.leaves:
            leaf.check()
        tree.structure.count()
    except UNREADABLE as error:
        raise CheckpointFailed(f"the tree in {where} cannot be read: {error}") from None
    return tree


def host_leaf(key: str, leaf: Any, caller: str) -> Leaf:
    """Describe a host value, for this caller. Raises ArgumentError if it is too large, or no value."""
    if isinstance(leaf, str):
        return Leaf(key, number=("str", leaf))
    if isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic):
        kind: Any = next(k for k in (bool, int, float, complex) if isinstance(leaf, k))
        return Leaf(key, number=(kind.__name__, repr(kind(leaf))))
    try:
        dtype = aval_of(signature_of(leaf)).dtype
    except ArgumentError:
        raise ArgumentError(
            f"{caller} was given {leaf!r} of type {type(leaf).__name__} at {key or 'the top'}; it takes pw "
            "arrays, jax arrays, numpy arrays, numbers and strings"
        ) from None
    prng = key_impl_of(dtype) or ""
    value = np.asarray(jax.random.key_data(leaf) if prng else leaf)
    if value.nbytes > INLINE_BYTES:
        raise ArgumentError(
            f"{caller} was given an array of {value.nbytes} bytes at {key or 'the top'} that is in this "
            "process. Hosts have no copy of it: put it on devices first, with pw.put"
        )
    return Leaf(key, "", value.shape, value.dtype.name, prng, data=value.tobytes())


def single_tree(shape: tuple[int, ...], dtype: str) -> bytes:
    """Describe a tree that is one array, called `SINGLE` in the files."""
    return encode(Tree([Leaf("", SINGLE, shape, dtype)]))


def single_in(described: Described, where: str) -> tuple[tuple[int, ...], str]:
    """Return the shape and dtype of the array in a checkpoint of one array. Raises CheckpointFailed."""
    leaves = read(described, where).leaves
    if len(leaves) != 1 or leaves[0].array != SINGLE:
        raise CheckpointFailed(f"the checkpoint {where} is a tree, not one array: use pw.restore")
    return leaves[0].shape, leaves[0].dtype
