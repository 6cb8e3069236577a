"""`host_function`: ordinary Python on the hosts, as a node of a program.

Compiled functions cannot read files, tokenise or log. A host function travels pickled
(cloudpickle), so a worker runs it only with `pw-worker --allow-python`; computations never travel
pickled.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import jax
from jax.tree_util import tree_flatten, tree_unflatten

from pw.client.arrays.mesh import Mesh, mesh_of
from pw.client.arrays.sharding import NamedSharding
from pw.client.arrays.signature import ArrayType, aval_of
from pw.client.trace.export import Traced
from pw.client.trace.function import JitFunction
from pw.core.errors import ArgumentError, TracingError
from pw.core.program import Computation, Kind


class _HostFunction(JitFunction[..., Any]):
    _kind = "pw.host_function"

    def __init__(
        self, fun: Callable[..., Any], results: Any, mesh: Mesh | None, timeout: float | None
    ) -> None:
        super().__init__(fun, mesh, timeout=timeout)
        leaves, self._results_tree = tree_flatten(results)
        for leaf in leaves:
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                raise ArgumentError(
                    f"result_shape_dtypes of {self._name!r} must be a tree of jax.ShapeDtypeStruct or "
                    f"arrays, it has a {type(leaf).__name__} in it"
                )
        self._results = [jax.core.ShapedArray(leaf.shape, leaf.dtype) for leaf in leaves]
        self._known: dict[Any, Traced] = {}
        self._pickling = threading.Lock()

    def _inlined(self, *args: Any, **kwargs: Any) -> Any:
        raise TracingError(
            f"the host function {self._name!r} was called while JAX traces another function; compiled "
            "functions cannot call Python. Call it beside them, in a pw.program"
        )

    def _trace(self, key: Any) -> Traced:
        """Pickle the function; there is nothing to trace."""
        with self._pickling:
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = self._described(key)
            return known

    def _described(self, key: Any) -> Traced:
        tree, signature, _, mesh, _ = key
        replicated = NamedSharding.replicated(mesh)
        inputs = tuple(ArrayType.of(aval_of(leaf), replicated) for leaf in signature)
        outputs = tuple(ArrayType.of(aval, replicated) for aval in self._results)
        for type_ in (*inputs, *outputs):
            if type_.key_impl is not None:
                raise ArgumentError(
                    f"the host function {self._name!r} takes or gives typed PRNG keys, which have no "
                    "numpy form; pass jax.random.key_data of them"
                )
        artifact = cloudpickle.dumps(_flat(self.__wrapped__, tree, self._results_tree))
        computation = Computation(
            self._name,
            hashlib.sha256(artifact).digest(),
            mesh.placement,
            tuple(type_.spec for type_ in inputs),
            tuple(type_.spec for type_ in outputs),
            kind=Kind.PYTHON,
        )
        return Traced(computation, artifact, mesh, inputs, (), outputs, self._results_tree)


def _flat(fun: Callable[..., Any], tree: Any, results_tree: Any) -> Callable[..., list[Any]]:
    """Return `fun` as a function of numpy leaves; it runs on hosts, without importing pw."""

    def flat(*leaves: Any) -> list[Any]:
        args, kwargs = tree_unflatten(tree, leaves)
        results, found = tree_flatten(fun(*args, **kwargs))
        if found != results_tree:
            raise TypeError(f"it returned {found}, but result_shape_dtypes says {results_tree}")
        return list(results)

    return flat


def host_function(
    fun: Callable[..., Any],
    result_shape_dtypes: Any,
    *,
    devices: Sequence[Any] | Any = None,
    timeout: float | None = None,
) -> Callable[..., Any]:
    """Make a Python function run on the hosts of `devices`, as a node like any computation.

    It takes numpy arrays, and its results become arrays on the devices. If the devices are on
    several hosts, each host calls it once, and it must return the same values there; if it raises
    on one host, the call fails on all. A host runs one call at a time, beside its computations. Its
    output, warnings and log records (from `WARNING` on) appear here as `(host) line`: see
    `pw.connect`.

    Args:
        fun: takes numpy arrays (whole, in the tree of the call) and returns arrays.
        result_shape_dtypes: the tree of results, as `jax.ShapeDtypeStruct`s (as for
            `jax.pure_callback`).
        devices: virtual devices, or one; by default as for `pw.jit`.
        timeout: seconds that a call may take once it is launched, as for `pw.jit`.

    Raises:
        ArgumentError: `result_shape_dtypes` is not a tree of shapes and dtypes.
        CompileError: when a result is read, if a host does not allow Python functions.
        ComputationFailed: when a result is read, if the function raised; with its traceback.
    """
    mesh = None if devices is None else mesh_of(devices)
    return _HostFunction(fun, result_shape_dtypes, mesh, timeout)
