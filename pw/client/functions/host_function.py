"""`host_function`: ordinary Python on the hosts, as a node of a program.

Compiled functions cannot read files, tokenise or log. A host function travels pickled
(cloudpickle), so a worker runs it only with `pw-worker --allow-python`; computations never travel
pickled.
"""

from __future__ import annotations

import hashlib
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import jax
from jax.tree_util import tree_flatten, tree_unflatten

from pw.client.arrays.devices import slice_for_python
from pw.client.arrays.mesh import OwnMesh, mesh_of
from pw.client.arrays.ragged import check_pairs, is_ragged, pairs_of
from pw.client.arrays.sharding import OwnSharding
from pw.client.arrays.signature import ArrayType, aval_of
from pw.client.computations.export import Traced
from pw.client.equations.calls import ProgramTrace
from pw.client.equations.python_calls import call_python
from pw.client.functions.function import JitFunction
from pw.client.functions.prefixes import mesh_in, on_mesh, spread
from pw.client.keywords import checks_keywords
from pw.core.errors import ArgumentError, PlacementError, ResultMismatch, TracingError
from pw.core.functions.host_calls import HostCall, Structure
from pw.core.programs.program import Computation, Kind
from pw.core.programs.trees import AnyLeaf, PlainTree, is_plain


class _HostFunction(JitFunction[..., Any]):
    _kind = "pw.host_function"
    why_no_gradient = (
        "is a host function: Python has no gradient. If none is meant to flow through it, pass what it "
        "returns through pw.jit(jax.lax.stop_gradient)"
    )

    def __init__(
        self,
        fun: Callable[..., Any],
        results: Any,
        mesh: Any,
        out_shardings: Any,
        timeout: float | None,
    ) -> None:
        super().__init__(fun, mesh, timeout=timeout)
        avals, self._results_tree = declared(results, f"result_shape_dtypes of {self._name!r}")
        ragged = pairs_of(self._results_tree)
        check_pairs(ragged, avals, f"result_shape_dtypes of {self._name!r}")
        self._results = avals
        self._wanted = spread(out_shardings, results, f"out_shardings of {self._name!r}")
        self._makes_part = takes_part(fun) and any(one is not None for one in self._wanted)
        if self._makes_part and ragged:
            raise ArgumentError(
                f"{self._name!r} makes a part of its results, and one of them is a pw.Ragged; a function that "
                "returns a pw.Ragged makes it whole, without the parameter part"
            )
        self._computations: dict[Any, Traced] = {}
        self._pickling = threading.Lock()

    def _inlined(self, *args: Any, **kwargs: Any) -> Any:
        raise TracingError(
            f"the host function {self._name!r} was called while JAX traces another function; compiled "
            "functions cannot call Python. Call it beside them, in a pw.program"
        )

    def _bound(
        self, program: ProgramTrace, tree: Any, leaves: Sequence[Any], statics: tuple[Any, ...]
    ) -> Any:
        key = self._key_in(program, tree, leaves, statics)
        results = self._trace(key).outputs
        values = call_python(self, key, leaves, [type_.aval for type_ in results])
        return tree_unflatten(self._results_tree, values)

    def _trace(self, key: Any) -> Traced:
        """Pickle the function; there is nothing to trace."""
        with self._pickling:
            if key not in self._computations:
                self._computations[key] = self._described(key)
            return self._computations[key]

    def _described(self, key: Any) -> Traced:
        tree, signature, _, mesh, _ = key
        if mesh.parts:
            raise PlacementError(
                f"the host function {self._name!r} was given {mesh!r}, but a host function runs on one "
                "island: give it devices of one, and pw.put moves what it makes"
            )
        replicated = OwnSharding.replicated(mesh)
        inputs = tuple(ArrayType.of(aval_of(leaf), replicated) for leaf in signature)
        counted = pairs_of(tree)
        check_pairs(counted, [type_.aval for type_ in inputs], self._name)
        outputs = output_types(self._results, self._wanted, mesh)
        for type_ in (*inputs, *outputs):
            if type_.key_impl is not None:
                raise ArgumentError(
                    f"the host function {self._name!r} takes or gives typed PRNG keys, which have no "
                    "numpy form; pass jax.random.key_data of them"
                )
        returned, ragged = returned_structure(self._results_tree)
        function = HostCall(self.__wrapped__, structure(tree), returned, self._makes_part, ragged)
        artifact = pickled(function, f"the host function {self._name!r}")
        computation = Computation(
            self._name,
            hashlib.sha256(artifact).digest(),
            mesh.placement,
            tuple(type_.spec for type_ in inputs),
            tuple(type_.spec for type_ in outputs),
            kind=Kind.PYTHON,
        )
        return Traced(computation, artifact, mesh, inputs, (), outputs, self._results_tree, counted)


def declared(tree: Any, what: str) -> tuple[list[Any], Any]:
    """Return the abstract values of a tree of shapes and dtypes, and its structure. Raises ArgumentError."""
    leaves, structure = tree_flatten(tree)
    for leaf in leaves:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ArgumentError(
                f"{what} must be a tree of jax.ShapeDtypeStruct or "
                f"arrays, it has a {type(leaf).__name__} in it"
            )
    return [jax.core.ShapedArray(leaf.shape, leaf.dtype) for leaf in leaves], structure


def output_types(
    avals: Sequence[Any], wanted: Sequence[Any], mesh: OwnMesh
) -> tuple[ArrayType, ...]:
    """Return the types of results with these shardings on `mesh`; None is replicated. Raises ShardingError."""
    types = []
    for aval, entry in zip(avals, wanted, strict=True):
        sharding = OwnSharding.replicated(mesh) if entry is None else on_mesh(mesh, entry)
        sharding.core.check(tuple(aval.shape))
        types.append(ArrayType.of(aval, sharding))
    return tuple(types)


def takes_part(fun: Callable[..., Any]) -> bool:
    """Whether a function has a parameter called `part`."""
    try:
        return "part" in inspect.signature(fun).parameters
    except (TypeError, ValueError):  # built-in functions do not say
        return False


def pickled(value: Any, what: str) -> bytes:
    """Return a pickle that a host can load. Raises ArgumentError."""
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise ArgumentError(
            f"{what} cannot be sent to hosts, because something that it refers to cannot be pickled: "
            f"{type(error).__name__}: {error}. Make that thing inside the function"
        ) from error


def structure(tree: Any) -> Structure:
    """Return a tree's structure for hosts: without JAX where the tree has only plain nodes."""
    skeleton = tree_unflatten(tree, range(tree.num_leaves))
    return PlainTree(skeleton) if is_plain(skeleton) else _Tree(tree)


def returned_structure(tree: Any) -> tuple[Structure, tuple[bool, ...]]:
    """Return the structure of what a function returns, and which of its leaves are declared as `Ragged`."""
    numbers = tree_unflatten(tree, range(tree.num_leaves))
    leaves, reduced = tree_flatten(numbers, is_leaf=is_ragged)
    ragged = tuple(map(is_ragged, leaves))
    if not any(ragged):
        return structure(tree), ()
    skeleton = tree_unflatten(reduced, [AnyLeaf(at) if r else at for at, r in enumerate(ragged)])
    return (PlainTree(skeleton) if is_plain(skeleton) else _Tree(reduced)), ragged


class _Tree:
    """A structure with nodes that only JAX knows; a host that loads it imports JAX."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree

    def filled(self, leaves: Sequence[Any]) -> Any:
        """Return the tree with these leaves."""
        return tree_unflatten(self._tree, leaves)

    def leaves_of(self, value: Any) -> list[Any]:
        """Return the leaves of a value with this structure. Raises ResultMismatch."""
        leaves, own = tree_flatten(value, is_leaf=is_ragged)
        if own != self._tree:
            raise ResultMismatch(f"it returned {own}, but {self._tree} is declared")
        return list(leaves)


@checks_keywords
def host_function(
    fun: Callable[..., Any],
    result_shape_dtypes: Any,
    *,
    devices: Sequence[Any] | Any = None,
    mesh: jax.sharding.Mesh | None = None,
    hosts: int | str | Sequence[str] | None = None,
    out_shardings: Any = None,
    timeout: float | None = None,
) -> Callable[..., Any]:
    """Make a Python function run on the hosts of `devices`, or on `hosts`, as a node like any computation.

    It takes numpy arrays, and its results become arrays on the devices. It runs in a process beside
    the host's runtime, one for each client, with JAX on CPU; that process may die without harm to
    others. If the devices are on several hosts, each host calls it once; if it raises on one host, the
    call fails on all. A host runs one call of a client at a time, beside its computations. Its
    output, warnings and log records (from `WARNING` on) appear here as `(host) line`: see
    `pw.connect`.

    With `out_shardings`, each host needs only its part of the results. A function with the keyword
    parameter `part` makes only that: it gets a `pw.Part`, and returns arrays of the shapes that
    `part.slices` has. Any other function returns whole results, the same on all hosts.

    Args:
        fun: takes numpy arrays (whole, in the tree of the call) and returns arrays.
        result_shape_dtypes: the tree of whole results, as `jax.ShapeDtypeStruct`s (as for
            `jax.pure_callback`). Of a result whose size only the function knows, declare the largest: a
            `pw.Ragged` of rows and counts. The function then returns an array with any number of rows up to
            that, if there is one cell; or a sequence with one for each cell; or a `pw.Ragged`.
        devices: virtual devices, or one; by default as for `pw.jit`.
        mesh: a mesh, in place of `devices`.
        hosts: names of hosts of one island, as `pw status` shows them, or a number of hosts, any of
            one island that run Python functions. The results lie on one device of each, in a mesh with the
            axis `"hosts"`. A named host that is lost is waited for.
        out_shardings: as for `pw.jit`; by default, the results are replicated.
        timeout: seconds that a call may take once it is launched, as for `pw.jit`.

    Raises:
        InsufficientDevices: no island has those hosts.
        ArgumentError: `result_shape_dtypes` is not a tree of shapes and dtypes; in the call, if
            something that the function refers to cannot be pickled.
        ShardingError: in the call, if a result cannot be split that way.
        PythonRefused: a host of `hosts` does not allow Python functions; when a result is read, if
            one of the devices' does not.
        ResultMismatch: when a result is read, if it has another shape or dtype than declared, or more rows.
        ComputationFailed: when a result is read, if the function raised; with its traceback.
    """
    if sum(one is not None for one in (devices, mesh, hosts)) > 1:
        raise ArgumentError("pw.host_function takes one of devices=, mesh= and hosts=, not both")
    where: Any = mesh or mesh_in(out_shardings)
    if hosts is not None:
        where = OwnMesh(slice_for_python(hosts).devices, ("hosts",))
    elif devices is not None:
        where = mesh_of(devices)
    return _HostFunction(fun, result_shape_dtypes, where, out_shardings, timeout)
