"""`Derivative`: a kind of calls of a `pw.jit` function as two computations, forward and backward.

The function is traced together with `jax.vjp` of it, and cut in two (`pw.client.trace.graph`). So
custom derivatives and `jax.checkpoint` keep their meaning. The forward computation returns the results
and the residuals. A residual that is an argument or a result is not returned once more.

A cotangent of rows that belong to a `Ragged` argument is a `Ragged` itself, with the counts of the argument. So
only its rows that count travel, as on the way forward.

Values have names: arguments ("x", i), results ("y", i), and their cotangents ("gx", i) and ("gy", i).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

from pw.client.arrays.ragged import Ragged, pairs_of
from pw.client.arrays.sharding import NamedSharding
from pw.client.trace.export import jaxpr_of, tracing
from pw.client.trace.function import Call, JitFunction
from pw.client.trace.graph import Graph, Name, StagePiece, cut
from pw.core.errors import TracingError

tree_leaves, tree_unflatten = jax.tree_util.tree_leaves, jax.tree_util.tree_unflatten


class Derivative:
    """How calls of one kind are differentiated by some of their arguments.

    Args:
        call: the kind of calls.
        active: the numbers of the arguments, of floating-point or complex types.

    Raises:
        TracingError: the function has side effects.
        Exception: the function's own errors.
    """

    def __init__(self, call: Call, active: Sequence[int]) -> None:
        self.mesh = call.mesh
        self._call = call
        closed, self._results = jaxpr_of(call.function, call.tree, call.mesh, call.types)
        if closed.effects:
            raise TracingError(
                f"the function {call.name!r} cannot be sent to the hosts, because it has side effects. "
                "Callbacks into this process (jax.debug.print, io_callback) cannot travel: return such "
                "values and print them here"
            )
        self._avals = closed.out_avals
        graph = self._together(closed, active)
        self._depends = {name: _cotangents_of(graph, name) for name in _named("gx", active)}
        """The results on whose cotangents the cotangent of an argument depends."""
        given = [name for name, depends in self._depends.items() if depends]
        self.flows = frozenset[int]().union(*self._depends.values())
        """The results whose cotangents matter. All others are constants to the gradient."""
        results = _named("y", range(len(self._avals)))
        parts = [(call.name, results), (f"{call.name}_backward", given)]
        self._forward, self._backward = cut(graph, parts, "residual")
        position: dict[int, int] = {}
        where = [
            position.setdefault(id(variable), at)
            for at, variable in enumerate(self._forward.closed.jaxpr.outvars)
        ]
        self._extra = sorted({at for at in where if at >= len(results)})
        """The results of the forward computation that the function does not have itself."""
        self._kept = [
            where[self._forward.gives.index(name)]
            for name in self._backward.takes
            if name[0] == "residual"
        ]
        """The results of the forward computation that the backward one takes."""
        self._compiled = self._compile_forward()
        self._counts_of = dict(pairs_of(call.tree))
        """The argument with the counts of an argument with rows."""
        self._pulls: dict[Any, JitFunction[..., Any]] = {}

    def forward(self, leaves: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Call the function. Returns its results in their tree, and the residuals for `pull`."""
        results, extra = self._compiled(*tree_unflatten(self._call.tree, leaves))
        made = dict(enumerate(tree_leaves(results)))
        made |= dict(zip(self._extra, extra, strict=True))
        return results, [made[at] for at in self._kept]

    def pull(
        self,
        leaves: Sequence[Any],
        kept: Sequence[Any],
        shardings: Sequence[Any],
        cotangents: Sequence[Any],
    ) -> list[Any]:
        """Call the backward computation. Returns the cotangent of each argument, or None for zero.

        Args:
            leaves: the arguments of the call.
            kept: the residuals.
            shardings: of each result.
            cotangents: of each result; None for zero. One of rows may be a `Ragged`.
        """
        present = frozenset(at for at, one in enumerate(cotangents) if one is not None)
        wanted = {name[1] for name, depends in self._depends.items() if depends & present}
        if not wanted:
            return [None] * len(leaves)
        kinds = tuple(type(one) for one in cotangents)
        compiled = self._pulls.get(kinds)
        if compiled is None:
            compiled = self._compile_backward(present, wanted, shardings, kinds)
            self._pulls[kinds] = compiled
        arguments = tree_unflatten(self._call.tree, _only(leaves, self._used(wanted)))
        found: list[Any] = compiled(arguments, list(kept), list(cotangents))
        return found

    def _used(self, wanted: set[int]) -> set[int]:
        """Return the arguments of the backward computation; with the counts, where it takes or gives rows."""
        used = {name[1] for name in self._backward.takes if name[0] == "x"}
        return used | {self._counts_of[at] for at in used | wanted if at in self._counts_of}

    def _together(self, closed: Any, active: Sequence[int]) -> Graph:
        """Trace the function together with the cotangents of its arguments."""
        evaluate = jax.extend.core.jaxpr_as_fun(closed)
        ends = [at for at, aval in enumerate(self._avals) if is_inexact(aval)]

        def together(values: Sequence[Any], given: Sequence[Any]) -> list[Any]:
            def forward(moving: Sequence[Any]) -> tuple[list[Any], list[Any]]:
                moved = dict(enumerate(values)) | dict(zip(active, moving, strict=True))
                made = evaluate(*moved.values())
                return [made[at] for at in ends], made

            _, pull, made = jax.vjp(forward, [values[at] for at in active], has_aux=True)
            (found,) = pull(list(given))
            return [*made, *found]

        given = [jax.ShapeDtypeStruct(self._avals[at].shape, self._avals[at].dtype) for at in ends]
        with tracing(self.mesh):
            whole = jax.make_jaxpr(together)([type_.aval for type_ in self._call.types], given)
        takes = [*_named("x", range(len(self._call.types))), *_named("gy", ends)]
        gives = [*_named("y", range(len(self._avals))), *_named("gx", active)]
        return Graph(whole, takes, gives)

    def _compile_forward(self) -> JitFunction[..., Any]:
        call, piece, extra = self._call, self._forward, self._extra
        evaluate = jax.extend.core.jaxpr_as_fun(piece.closed)

        def forward(args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
            known = dict(enumerate(tree_leaves((args, kwargs))))
            made = evaluate(*[known[number] for _, number in piece.takes])
            results = tree_unflatten(self._results, made[: len(self._avals)])
            return results, [made[at] for at in extra]

        wanted = call.output_shardings(self._results, self._avals)
        out_shardings = (tree_unflatten(self._results, wanted), None)
        return self._jit(forward, piece, self._in_tree(_shardings(call)), out_shardings)

    def _compile_backward(
        self,
        present: frozenset[int],
        wanted: set[int],
        shardings: Sequence[Any],
        kinds: Sequence[type],
    ) -> JitFunction[..., Any]:
        call, piece = self._call, self._backward
        evaluate = jax.extend.core.jaxpr_as_fun(piece.closed)
        residuals = [name for name in piece.takes if name[0] == "residual"]

        def backward(arguments: Any, kept: Any, cotangents: Any) -> Any:
            known: dict[Name, Any] = dict(zip(residuals, kept, strict=True))
            values = call.tree.flatten_up_to(arguments)
            known |= _numbered("x", values)
            known |= _numbered("gy", [_rows(one) for one in cotangents])
            for number, aval in enumerate(self._avals):
                if number not in present and is_inexact(aval):
                    known["gy", number] = jnp.zeros(aval.shape, aval.dtype)
            made = evaluate(*[known[name] for name in piece.takes])
            found = {number: value for (_, number), value in zip(piece.gives, made, strict=True)}
            return [
                with_counts(at, found[at], values) if at in wanted else None
                for at in range(len(call.types))
            ]

        def with_counts(at: int, value: Any, others: Sequence[Any]) -> Any:
            return Ragged(value, others[self._counts_of[at]]) if at in self._counts_of else value

        own = _shardings(call)
        whole = NamedSharding.replicated(self.mesh)
        in_shardings = (
            self._in_tree(own, self._used(wanted)),
            None,
            [
                Ragged(sharding, whole) if kind is Ragged else sharding if at in present else None
                for at, (sharding, kind) in enumerate(zip(shardings, kinds, strict=True))
            ],
        )
        out_shardings = [
            with_counts(at, own[at], own) if at in wanted else None for at in range(len(own))
        ]
        return self._jit(backward, piece, in_shardings, out_shardings)

    def _in_tree(self, values: Sequence[Any], chosen: Any = None) -> Any:
        """Return values of the arguments in their tree, with None for those that are not chosen."""
        return tree_unflatten(self._call.tree, values if chosen is None else _only(values, chosen))

    def _jit(
        self, function: Any, piece: StagePiece, in_shardings: Any, out_shardings: Any
    ) -> JitFunction[..., Any]:
        function.__name__ = function.__qualname__ = piece.name
        return JitFunction(
            function, self.mesh, in_shardings, out_shardings, check_nans=self._call.check_nans
        )


def is_inexact(aval: Any) -> bool:
    """Whether gradients flow through values of this type."""
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def _rows(cotangent: Any) -> Any:
    return cotangent.rows if isinstance(cotangent, Ragged) else cotangent


def _cotangents_of(graph: Graph, name: Name) -> frozenset[int]:
    """Return the results on whose cotangents a cotangent depends; it is linear, so without any it is zero."""
    _, starts = graph.before([graph.results[name]], lambda variable: False)
    names = (graph.arguments.get(variable, ("constant", 0)) for variable in starts)
    return frozenset(number for kind, number in names if kind == "gy")


def _named(kind: str, numbers: Any) -> list[Name]:
    return [(kind, number) for number in numbers]


def _numbered(kind: str, values: Sequence[Any]) -> dict[Name, Any]:
    return {(kind, number): value for number, value in enumerate(values)}


def _only(values: Sequence[Any], chosen: Any) -> list[Any]:
    return [value if number in chosen else None for number, value in enumerate(values)]


def _shardings(call: Call) -> list[NamedSharding]:
    return [type_.sharding for type_ in call.types]
