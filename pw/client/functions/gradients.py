"""`pw.grad` and `pw.value_and_grad`: gradients of functions that call `pw.jit` functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pw.client.arrays.signature import aval_of, describe_leaf
from pw.client.equations.calls import ProgramTrace, program_trace
from pw.client.functions.argument_errors import in_words
from pw.client.functions.function import signature_of_call
from pw.client.functions.program import program
from pw.client.functions.wrapped import name_of, tree_flatten, under_jax_trace
from pw.client.keywords import checks_keywords
from pw.core.errors import ArgumentError


@checks_keywords
def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Make a function that returns the value of `fun` and its gradient, as `jax.value_and_grad` does.

    `fun` calls `pw.jit` or `pw.pmap` functions, each on its own devices, of any islands. For each call
    the program has one computation forward and one backward, on the same devices. Cotangents move
    between devices as values do. Inside of a `pw.jit` function this is `jax.value_and_grad`.

    A call whose arguments have a gradient does not donate them: the backward computation needs them.

    Args:
        fun: what `pw.program` can trace, of trees of arrays and numbers. It returns the loss, a
            floating-point number.
        argnums: the positional arguments to differentiate by: trees of floating-point (or complex)
            arrays.
        has_aux: `fun` returns a pair of the loss and a tree of other results.

    Returns:
        A function of the arguments of `fun`. It returns the pair (value, gradient): the value is what
        `fun` returns. The gradient has the tree of the argument, or is a tuple of such trees if
        `argnums` is a sequence. A gradient has the shape, dtype and sharding of its argument; an
        argument on which the loss does not depend has zeros. In a `pw.program` the call becomes part of the
        program; elsewhere it is a program of its own.

    Raises:
        ArgumentError: at a call, `fun` does not return a floating-point number, or an argument cannot be
            differentiated by.
        TracingError: at a call, a gradient would flow through a host function.
    """
    name = name_of(fun)
    if not callable(fun):
        raise TypeError(f"pw.value_and_grad takes a function, not {fun!r}")

    @functools.wraps(fun)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        trace = program_trace()
        if trace is not None:
            return _in_program(trace, fun, name, argnums, has_aux, args, kwargs)
        if under_jax_trace(tree_flatten((args, kwargs))[0]):
            return jax.value_and_grad(fun, argnums, has_aux)(*args, **kwargs)
        return alone(*args, **kwargs)

    alone = program(differentiated)
    return differentiated


@checks_keywords
def grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Make a function that returns the gradient of `fun`, as `jax.grad` does: see `pw.value_and_grad`.

    With `has_aux`, it returns the pair (gradient, other results).
    """
    both = value_and_grad(fun, argnums, has_aux)

    @functools.wraps(fun)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, result = both(*args, **kwargs)
        return (result, value[1]) if has_aux else result

    return gradient


def _positions(name: str, numbers: Sequence[int], count: int) -> list[int]:
    """Return the positions of the arguments to differentiate by. Raises ArgumentError."""
    for number in numbers:
        if not -count <= number < count:
            raise ArgumentError(
                f"argnums={number} of the gradient of {name!r}, but the call has {count} positional arguments; "
                "arguments that are given by name cannot be differentiated by"
            )
    return [number % count for number in numbers]


def _in_program(
    trace: ProgramTrace,
    fun: Callable[..., Any],
    name: str,
    argnums: int | Sequence[int],
    has_aux: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, Any]:
    """Return what `jax.value_and_grad` does in a program that JAX traces; gradients lie as their arguments."""
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    positions = _positions(name, numbers, len(args))
    for at in positions:
        before = len(tree_flatten(args[:at])[0])
        for number, leaf in enumerate(tree_flatten(args[at])[0]):
            where = f"{describe_leaf((args, {}), before + number)} of {name!r}"
            _check_active(where, leaf)

    def checked(*args: Any, **kwargs: Any) -> Any:
        value = fun(*args, **kwargs)
        _check_loss(name, value, has_aux)
        return value

    value, gradients = jax.value_and_grad(checked, argnums, has_aux)(*args, **kwargs)
    lies = tuple(jax.tree_util.tree_map(trace.sharding_of, args[at]) for at in positions)
    lies = lies[0] if isinstance(argnums, int) else lies
    return value, jax.tree_util.tree_map(_laid, gradients, lies)


def _laid(gradient: Any, sharding: Any) -> Any:
    return gradient if sharding is None else jax.device_put(gradient, sharding)


def _check_active(where: str, leaf: Any) -> None:
    """Raise ArgumentError if it is impossible to differentiate by a value."""
    try:
        aval = aval_of(*signature_of_call([leaf]))
    except ArgumentError:
        raise ArgumentError(
            f"{where} is {leaf!r}, which is no array: name another argument in argnums="
        ) from None
    if not jnp.issubdtype(aval.dtype, jnp.inexact):
        raise ArgumentError(
            f"{where} is {aval.str_short()}, and gradients are of floating-point arrays only: "
            "name another argument in argnums=, or pass this value as an argument of its own"
        )


def _check_loss(name: str, value: Any, has_aux: bool) -> None:
    """Raise ArgumentError if a function has not returned one floating-point number."""
    if has_aux and not (isinstance(value, tuple) and len(value) == 2):
        raise ArgumentError(
            f"{name!r} returned {in_words(value)}, and with has_aux=True it has to return a pair of the loss "
            "and other results; without any, leave out has_aux"
        )
    leaf = value[0] if has_aux else value
    try:
        aval = aval_of(*signature_of_call([leaf]))
    except ArgumentError:
        aval = None
    if aval is None or aval.shape or not jnp.issubdtype(aval.dtype, jnp.floating):
        raise ArgumentError(
            f"{name!r} returned {in_words(leaf)}, and a gradient is of one floating-point number: return the "
            "loss, and other results with has_aux=True"
        )
