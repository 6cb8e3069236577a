"""`pw.publish`: arrays get a name, under which other sessions find them."""

from __future__ import annotations

import asyncio
import math
import re
import weakref
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from pw.client.arrays import jax_arrays
from pw.client.arrays.array import Array
from pw.client.checkpoints.tree import TreeNode, host_leaf
from pw.client.connection import current
from pw.client.connection.waiting import seconds
from pw.client.functions.transfer import put
from pw.client.functions.wrapped import under_jax_trace
from pw.client.keywords import checks_keywords
from pw.client.sharing.description import (
    Member,
    SharedLeaf,
    SharedMesh,
    SharedTree,
    encode,
    leaf_of,
)
from pw.core.errors import ArgumentError, TracerError
from pw.core.messages import EVERY_TENANT, INLINE_BYTES, Published
from pw.core.sharding import ArraySpec
from pw.transport.log import log

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
"""Seconds of each unit of a duration."""

_terms: weakref.WeakKeyDictionary[Any, dict[str, tuple[float, tuple[str, ...]]]] = (
    weakref.WeakKeyDictionary()
)
"""`keep` in seconds, and `to`, of the last publication of each session under each name."""


class Publication:
    """A version on its way to be the newest one of its name; it goes on without this object."""

    __slots__ = ("_future", "name")

    def __init__(self, name: str, future: Future[Published]) -> None:
        self.name = name
        self._future = future

    def result(self, timeout: float | None = None) -> int:
        """Wait until every lookup finds this version, for at most `timeout` seconds; returns its number.

        Raises:
            TimeoutError: it took longer; the publication goes on.
            ArgumentError: `timeout` is no number of seconds.
            NameNotFound: the name was ended before all arrays were there, and then the controller was lost.
            Error: the error of an array, or why it cannot be published. The version before it stays.
        """
        return self._future.result(seconds(timeout)).version

    def done(self) -> bool:
        """Whether every lookup finds it, or it has failed."""
        return self._future.done()

    def __await__(self) -> Generator[Any, None, int]:
        # Shielded: the publication does not end with the task that waits for it.
        published = yield from asyncio.shield(asyncio.wrap_future(self._future)).__await__()
        return int(published.version)

    def __repr__(self) -> str:
        if not self.done():
            return f"<pw.Publication of {self.name!r}: under way>"
        error = self._future.exception()
        if error is not None:
            return f"<pw.Publication of {self.name!r}: failed, {error}>"
        return f"<pw.Publication of {self.name!r}: version {self._future.result().version}>"


@checks_keywords
def publish(name: str, tree: Any, *, keep: Any = None, to: Any = None) -> Publication:
    """Give the arrays of a tree a name, under which other sessions get them with `pw.lookup`.

    No bytes move: the name holds views of the shards where they lie. This session may delete its arrays, and
    donate them (then their shards are copied first). Returns at once; it is in order with computations. When
    all arrays are computed, this version replaces the one before it, at once for all shards and all readers. An
    older version stays as long as a reader has arrays of it.

    Args:
        name: any text without a slash. It belongs to the tenant of this session.
        tree: tree of pw arrays, of jax arrays on virtual devices, and of host values: numbers, strings and
            numpy arrays; large ones go to a default slice, as in `pw.put`. Readers get its dicts, lists, tuples
            and None as they are, and containers of other classes (named tuples, dataclasses) as dicts.
        keep: how long the name outlasts this session: seconds, a text such as "30s", "10m", "1h" or "2d", or
            True for no end (`pw.unpublish` ends it), False to end with the session. The time counts from the
            end of this session. None: as this session has said for the name before, else False. Arrays that
            readers have stay in any case.
        to: names of the other tenants that may look it up, or "all"; () for this tenant only. None: as this
            session has said for the name before, else ().

    Raises:
        ArgumentError: the name, `keep` or `to` is none, or the tree has other values.
        ArrayDeleted: an array was deleted or donated before.
        NotOwner: the arrays belong to different sessions.
        TracerError: called in a function that is being traced.
    """
    _check_name(name)
    keep_s = None if keep is None else _seconds_of(keep)
    readers = None if to is None else _tenants_of(to)
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    if under_jax_trace([leaf for _, leaf in leaves]):
        raise TracerError(
            "pw.publish was called in a function that JAX traces; call it on what the function returns"
        )
    values = jax_arrays.from_jax([leaf for _, leaf in leaves])
    values = [put(value) if _is_large(value) else value for value in values]
    arrays = [value for value in values if isinstance(value, Array)]
    session = arrays[0]._runtime if arrays else current.runtime()
    groups: dict[int, dict[int, ArraySpec]] = {}
    for array in arrays:
        array._check_owner(session)
        for member in array.members:
            spec = member._type.spec
            groups.setdefault(spec.placement.slice, {})[member._id] = spec
    slices = list(groups)
    at: dict[int, Member] = {
        number: (part, index)
        for part, group in enumerate(groups.values())
        for index, number in enumerate(group)
    }
    meshes: dict[Any, int] = {}
    described = []
    for (keys, _), value in zip(leaves, values, strict=True):
        key = jax.tree_util.keystr(keys)
        if isinstance(value, Array):
            mesh = meshes.setdefault(value._type.sharding.mesh, len(meshes))
            described.append(leaf_of(key, value, [at[one._id] for one in value.members], mesh))
        else:
            described.append(SharedLeaf(*_fields(host_leaf(key, value, "pw.publish"))))
    shared = SharedTree(
        described, TreeNode.of(tree), [SharedMesh.of(mesh, slices) for mesh in meshes]
    )
    offers = [list(group.items()) for group in groups.values()]
    terms = _terms.setdefault(session, {})
    former_s, former_readers = terms.get(name, (0.0, ()))
    keep_s = former_s if keep_s is None else keep_s
    readers = former_readers if readers is None else readers
    terms[name] = keep_s, readers
    future = session.publish(name, offers, encode(shared), keep_s, readers)
    future.add_done_callback(_log_failure)
    return Publication(name, future)


@checks_keywords
def unpublish(name: str) -> None:
    """End a name: later lookups do not find it. What readers have, they keep.

    Args:
        name: the name; an operator writes `tenant/name` for one of another tenant.

    Raises:
        NameNotFound: nothing is published under it.
        AccessRefused: it belongs to another tenant.
    """
    if not isinstance(name, str):
        raise ArgumentError(f"pw.unpublish takes a name, not {name!r}")
    current.runtime().ask.unpublish(name).result()


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name or "/" in name:
        raise ArgumentError(
            f"{name!r} is no name for arrays: pw.publish takes a text without a slash, such as 'base'"
        )


def _seconds_of(keep: Any) -> float:
    """Return for how many seconds a name outlasts its session."""
    if keep is False:
        return 0.0
    if keep is True:
        return math.inf
    if isinstance(keep, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", keep.strip())
        if match is not None:
            return float(match[1]) * _UNITS_S[match[2]]
    elif isinstance(keep, (int, float)) and keep >= 0:
        return float(keep)
    raise ArgumentError(
        f"keep={keep!r} is no duration: give seconds, a text such as '30s', '10m', '1h' or '2d', or True"
    )


def _tenants_of(to: Any) -> tuple[str, ...]:
    names: Sequence[Any] = (to,) if isinstance(to, str) else tuple(to)
    if not all(isinstance(one, str) and one for one in names):
        raise ArgumentError(
            f"to={to!r} has no names of tenants; give a list of them, or {EVERY_TENANT!r}"
        )
    return tuple(names)


def _is_large(value: Any) -> bool:
    """Whether a value of this process is too large for the description."""
    if isinstance(value, Array) or not isinstance(value, (np.ndarray, jax.Array)):
        return False
    return value.nbytes > INLINE_BYTES


def _fields(leaf: Any) -> list[Any]:
    return [getattr(leaf, field) for field in leaf.__struct_fields__]


def _log_failure(future: Future[Published]) -> None:
    """Log the error, in case the script does not read the result."""
    error = future.exception()
    if error is not None:
        log("warning", "publication failed", "client", error=error)
