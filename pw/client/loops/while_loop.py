"""`pw.while_loop`: a loop whose hosts decide when it ends.

In a program it is equations of JAX (`pw.client.loops.native`). On one mesh, iterations are one computation; on
several, they are guarded computations. A loop that is called alone runs in bursts (`pw.client.loops.driver`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any

from pw.client.arrays import jax_arrays
from pw.client.arrays.mesh import default_mesh
from pw.client.arrays.ragged import check_counts, pairs_of
from pw.client.arrays.signature import ArrayType, tracing_configuration
from pw.client.connection import jax_backend
from pw.client.equations.calls import program_trace
from pw.client.functions.tracebacks import leave_out_runtime
from pw.client.functions.wrapped import (
    name_of,
    timeout_s_of,
    tree_flatten,
    tree_unflatten,
    under_jax_trace,
)
from pw.client.keywords import checks_keywords
from pw.client.loops.bursts import Bursts
from pw.client.loops.carry import learn
from pw.client.loops.driver import drive
from pw.client.loops.loop import Loop
from pw.client.loops.native import in_function, in_program
from pw.core.errors import ArgumentError


@checks_keywords
def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: Any,
    *,
    max_iterations: int | None = None,
    timeout: float | None = None,
) -> Any:
    """Return the first of `init_val`, `body_fun(init_val)`, ... for which `cond_fun` is false.

    The functions call `pw.jit` functions on any devices. Called alone, the loop runs in bursts of iterations,
    which its hosts run without waiting for the client, and returns when it has ended; it is kept for these two
    functions: define them once. In a `pw.program` it is a part of the program. In a `pw.jit` function it is
    `jax.lax.while_loop`.

    Args:
        cond_fun: makes a scalar boolean of the carry.
        body_fun: makes the next carry: of the same tree, shapes and dtypes. Where its first result lies, the
            carry lies from then on.
        init_val: the first carry, a tree of arrays and numbers. Its arrays stay, except those that the
            functions donate.
        max_iterations: the loop ends after so many iterations, with the carry as it is then. A loop over
            several meshes in a `pw.program` needs it: so many iterations are recorded, and those behind the
            last one are skipped.
        timeout: seconds that a loop called alone may take, from the call on. A loop in a `pw.program` or a
            `pw.jit` function takes none: give it to the program or function.

    Raises:
        ArgumentError: the predicate is no scalar boolean; or the body changes the tree, a shape or a dtype;
            or `timeout` is given in a program. Nothing has been launched then.
        ComputationTimeout: the loop did not end within `timeout`.
        Error: of an iteration.
    """
    try:
        for fun in (cond_fun, body_fun):
            if not callable(fun):
                raise TypeError(f"pw.while_loop takes two functions, and was given {fun!r}")
        limit = _limit(max_iterations)
        timeout_s = timeout_s_of(timeout)
        leaves, tree = tree_flatten(init_val)
        for rows, counts in pairs_of(tree):
            check_counts(leaves[counts], leaves[rows], "pw.while_loop")
        loop = Loop(cond_fun, body_fun, tree)
        program = program_trace()
        is_in_jax = under_jax_trace(leaves)
        if timeout is not None and is_in_jax:
            outer = "pw.jit" if program is None else "pw.program"
            raise ArgumentError(
                f"pw.while_loop of {name_of(body_fun)!r} was given timeout={timeout!r} in a {outer} function, "
                f"where a loop has no timeout of its own; give it to the function, as in {outer}(f, "
                f"timeout={timeout!r}), or call the loop outside of it"
            )
        if program is not None:
            return tree_unflatten(tree, in_program(program, loop, limit, leaves))
        if is_in_jax:
            return tree_unflatten(tree, in_function(loop, limit, leaves))
        if jax_backend.client() is not None:
            leaves = jax_arrays.from_jax(leaves)
        return tree_unflatten(tree, _alone(loop, limit, timeout_s, leaves))
    except Exception as error:
        leave_out_runtime(error)
        raise


def _limit(max_iterations: int | None) -> int | None:
    if max_iterations is None:
        return None
    try:
        limit = index(max_iterations)
    except TypeError:
        limit = -1
    if limit < 0:
        raise ValueError(f"max_iterations is a whole number of iterations, not {max_iterations!r}")
    return limit


def _alone(loop: Loop, limit: int | None, timeout_s: float, leaves: Sequence[Any]) -> Sequence[Any]:
    """Run a loop; returns the leaves of the last carry."""
    bursts = _bursts(loop, leaves)
    state = bursts.start(leaves)
    name = f"pw.while_loop of {name_of(loop.body_fun)!r}"
    return drive(bursts, state, max_iterations=limit, timeout_s=timeout_s, name=name)[1:]


def _bursts(loop: Loop, leaves: Sequence[Any]) -> Bursts:
    """Return the bursts of a loop for a carry of this kind, kept where the carry lies."""
    signature = loop.signature(leaves)
    lies = [type_.sharding for type_ in signature if isinstance(type_, ArrayType)]
    mesh = lies[0].mesh if lies else default_mesh()
    table = mesh.slice.compiled
    key = (
        "while_loop",
        loop.cond_fun,
        loop.body_fun,
        loop.tree,
        tuple(signature),
        tracing_configuration(),
    )
    try:
        bursts: Bursts | None = table.get(key)
    except TypeError:  # a function cannot be hashed
        return Bursts(loop, learn(loop, signature), signature)
    if bursts is None:
        bursts = table.add(key, Bursts(loop, learn(loop, signature), signature))
    return bursts
