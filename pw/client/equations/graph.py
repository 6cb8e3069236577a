"""Parts of a jaxpr: what a stage, and each of its tasks, is made of.

A `StagePiece` is a jaxpr whose arguments and results have names, such as ("param", 3). `Graph` takes a traced
function apart: it returns the piece that computes some of its values from others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

from pw.client.computations.captured import UNSPECIFIED

Name = tuple[str, int]
"""A value of a stage: its kind, and its number among those of this kind."""

Literal, Var = jax.extend.core.Literal, jax.extend.core.Var

CHEAP = frozenset(
    """
    abs add add_any and broadcast_in_dim ceil clamp convert_element_type copy cos div eq
    erf exp exp2 expand_dims expm1 floor ge gt integer_pow iota is_finite le log log1p
    logistic lt max min mul ne neg not or pow real rem reshape round rsqrt select_n sign
    sin sqrt square squeeze stop_gradient sub tanh transpose xor
    """.split()  # noqa: SIM905
)
"""Primitives of which XLA makes one pass with their neighbours: to do them again costs less than to keep."""


@dataclass(frozen=True, eq=False)
class StagePiece:
    """A function of named values: a part of a stage."""

    name: str
    closed: Any
    takes: tuple[Name, ...]
    gives: tuple[Name, ...]

    def function(self) -> Callable[..., list[Any]]:
        """Return the function of the values `takes`, which returns the values `gives`."""
        evaluate = jax.extend.core.jaxpr_as_fun(self.closed)

        def piece(*values: Any) -> list[Any]:
            return list(evaluate(*values))

        piece.__name__ = piece.__qualname__ = self.name
        return piece

    def aval(self, result: Name) -> Any:
        """Return the shape and dtype of one of the results."""
        return self.closed.out_avals[self.gives.index(result)]


class Graph:
    """The equations of a traced function, with the calls of inner `jax.jit` functions put in line.

    Args:
        closed: the traced function.
        takes: the names of its arguments.
        gives: the names of its results.
    """

    def __init__(self, closed: Any, takes: Sequence[Name], gives: Sequence[Name]) -> None:
        self.jaxpr = closed.jaxpr
        self.equations: list[Any] = []
        self.constants: dict[Any, Any] = dict(
            zip(closed.jaxpr.constvars, closed.consts, strict=True)
        )
        renamed: dict[Any, Any] = {}
        self._add(closed.jaxpr, renamed, is_inner=False)
        self.arguments: dict[Any, Name] = dict(zip(closed.jaxpr.invars, takes, strict=True))
        self.results: dict[Name, Any] = {
            name: _current(atom, renamed)
            for name, atom in zip(gives, closed.jaxpr.outvars, strict=True)
        }
        self.position: dict[Any, int] = {
            variable: at for at, eqn in enumerate(self.equations) for variable in eqn.outvars
        }
        """Number of the equation that makes each variable."""

    def _add(self, jaxpr: Any, renamed: dict[Any, Any], is_inner: bool) -> None:
        for eqn in jaxpr.eqns:
            operands = [_current(atom, renamed) for atom in eqn.invars]
            if _is_plain_call(eqn):
                body = eqn.params["jaxpr"]
                own = dict(zip(body.jaxpr.invars, operands, strict=True))
                for variable, value in zip(body.jaxpr.constvars, body.consts, strict=True):
                    own[variable] = fresh = Var(variable.aval)
                    self.constants[fresh] = value
                self._add(body.jaxpr, own, is_inner=True)
                for outer, atom in zip(eqn.outvars, body.jaxpr.outvars, strict=True):
                    renamed[outer] = _current(atom, own)
                continue
            results = eqn.outvars
            if is_inner:  # the same body may be called again, with variables of its own
                results = [Var(variable.aval) for variable in eqn.outvars]
                renamed.update(zip(eqn.outvars, results, strict=True))
            self.equations.append(eqn.replace(invars=operands, outvars=results))

    def before(
        self, wanted: Iterable[Any], is_there: Callable[[Any], bool]
    ) -> tuple[set[int], dict[Any, None]]:
        """Return the equations from which `wanted` follow, and the variables they start from.

        Args:
            wanted: variables or literals.
            is_there: whether a variable is there already; arguments and constants always are.
        """
        equations: set[int] = set()
        starts: dict[Any, None] = {}
        seen: set[Any] = set()
        waiting = [atom for atom in wanted if not isinstance(atom, Literal)]
        while waiting:
            variable = waiting.pop()
            if variable in seen:
                continue
            seen.add(variable)
            at = self.position.get(variable)
            if at is None or is_there(variable):
                starts[variable] = None
            elif at not in equations:
                equations.add(at)
                operands = self.equations[at].invars
                waiting += [atom for atom in operands if not isinstance(atom, Literal)]
        return equations, starts

    def piece(
        self,
        name: str,
        equations: Iterable[int],
        gives: Mapping[Name, Any],
        names: Mapping[Any, Name],
        changed: Mapping[int, Any] | None = None,
    ) -> StagePiece:
        """Return the piece of these equations; it takes those variables of `names` that it uses.

        `changed` has other forms of some equations.
        """
        forms = changed or {}
        chosen = [forms.get(at, self.equations[at]) for at in sorted(equations)]
        own = {variable for eqn in chosen for variable in eqn.outvars}
        used: dict[Any, None] = {}
        for atom in (*(atom for eqn in chosen for atom in eqn.invars), *gives.values()):
            if not isinstance(atom, Literal) and atom not in own:
                used[atom] = None
        constants = {v: self.constants[v] for v in used if v in self.constants}
        takes = {v: names[v] for v in used if v not in constants}
        jaxpr = self.jaxpr.replace(
            constvars=list(constants),
            invars=list(takes),
            outvars=list(gives.values()),
            eqns=chosen,
            debug_info=self.jaxpr.debug_info._replace(arg_names=None, result_paths=None),
        )
        closed = jax.extend.core.ClosedJaxpr(jaxpr, list(constants.values()))
        return StagePiece(name, closed, tuple(takes.values()), tuple(gives))


def smallest(
    graph: Graph, needed: Sequence[Any], free: Iterable[Any], kept: Iterable[Any] = ()
) -> dict[Any, None]:
    """Return values from which all of `needed` follow cheaply, in as few bytes as a greedy choice finds.

    Args:
        graph: the function.
        needed: variables that equations make.
        free: variables that are kept for other reasons. They are among the result.
        kept: variables that cost nothing, if something follows from them.
    """
    chosen: dict[Any, None] = dict.fromkeys(free)

    def cheap(variable: Any) -> bool:
        eqn = graph.equations[graph.position[variable]]
        return eqn.primitive.name in CHEAP

    for variable in needed:
        if not cheap(variable):
            chosen[variable] = None
    already = set(kept)
    for variable in sorted(needed, key=lambda v: graph.position[v]):
        if variable in chosen or not cheap(variable):
            continue
        roots = _roots(graph, variable, cheap, chosen)
        new = [root for root in roots if root not in chosen and root not in already]
        if sum(size_bytes(root.aval) for root in new) <= size_bytes(variable.aval):
            chosen.update(dict.fromkeys(roots))
        else:
            chosen[variable] = None
    return chosen


def _roots(
    graph: Graph, variable: Any, cheap: Callable[[Any], bool], chosen: Mapping[Any, None]
) -> list[Any]:
    """Return the values that are not cheap, or chosen, from which a variable follows."""
    _, starts = graph.before(
        [variable], lambda v: v in chosen or (v is not variable and not cheap(v))
    )
    return [start for start in starts if start in graph.position]


def size_bytes(aval: Any) -> int:
    """Return the size of an array of this type."""
    itemsize = aval.dtype.itemsize if jnp.issubdtype(aval.dtype, jnp.number) else 1
    return int(math.prod(aval.shape) * itemsize)


def bodies(equation: Any) -> Iterator[Any]:
    """Yield the jaxprs that an equation calls: the bodies of loops, branches and checkpoints."""
    for value in equation.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(one, jax.extend.core.ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, jax.extend.core.Jaxpr):
                yield one


def _current(atom: Any, renamed: Mapping[Any, Any]) -> Any:
    return atom if isinstance(atom, Literal) else renamed.get(atom, atom)


def _is_plain_call(eqn: Any) -> bool:
    """Whether an equation calls an inner `jax.jit` function that says nothing about shardings."""
    if eqn.primitive.name != "jit" or hasattr(eqn.params["name"], "kind"):  # of the program
        return False
    shardings = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    return all(sharding is UNSPECIFIED for sharding in shardings)
