"""Errors of JAX while it traces a program, in words that name the program and the user's line."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from traceback import walk_tb
from types import TracebackType
from typing import Any

import jax
import numpy as np

from pw.client.equations.calls import program_trace
from pw.core.errors import ArgumentError, TracerError
from pw.core.jax_private.tracing import is_pmap_call

_WHY: dict[type[Exception], str] = {
    jax.errors.TracerBoolConversionError: "bool() (an if, while, and, or, or assert)",
    jax.errors.TracerArrayConversionError: "conversion to numpy",
    jax.errors.TracerIntegerConversionError: "using it as an index or a count",
    jax.errors.ConcretizationTypeError: "int(), float() or item()",
}
_NO_SHARDING = "The 'sharding' attribute is not available on traced array"
_NO_METHOD = "method is not available on traced array"
_NO_REVERSE = "Reverse-mode differentiation does not work for lax.while_loop"
_NOT_USERS = ("pw.client", "jax", "numpy")


@contextlib.contextmanager
def in_words_of(program: str) -> Iterator[None]:
    """In the block, errors of JAX about values that do not exist become `TracerError`."""
    try:
        yield
    except AttributeError as error:
        if _NO_SHARDING in str(error):
            raise TracerError(
                f"x.sharding was read in the program {program!r}, in {_line(error)}, but while a program is "
                "traced its values lie nowhere yet. Read it outside, or say where values lie with "
                "out_shardings= of pw.jit, or pw.put(x, sharding=...)"
            ) from None
        if _NO_METHOD not in str(error):
            raise
        raise _needed(program, "waiting", error) from None
    except jax.errors.NonConcreteBooleanIndexError as error:
        raise ArgumentError(
            f"a mask of the program {program!r} chooses, in {_line(error)}, how many elements there are, and "
            "shapes are known before values: use jnp.where(mask, x, other), or pw.get(mask) outside"
        ) from None
    except IndexError as error:
        if "Slice entries must be static integers" not in str(error):
            raise
        raise _needed(program, "using it as the end of a slice", error) from None
    except jax.errors.UnexpectedTracerError as error:
        raise TracerError(
            f"a value{_type_in(error)} was used outside of the function that made it, in {_line(error)}, while "
            f"the program {program!r} was traced: a value that a branch of a pw.cond, has made; a loop, or "
            "another program. Return it from both branches, or from the function, and use what that returned"
        ) from None
    except ValueError as error:
        if _NO_REVERSE not in str(error):
            raise
        trace = program_trace()
        names = [] if trace is None else sorted(set(trace.unbounded))
        loop = f"the pw.while_loop of {' or '.join(map(repr, names))}" if names else "a loop"
        raise ArgumentError(
            f"a gradient flows through {loop} in the program {program!r}, which needs a bound for that; use "
            "pw.while_loop, and give max_iterations"
        ) from None
    except tuple(_WHY) as error:
        why = next(words for kind, words in _WHY.items() if isinstance(error, kind))
        raise _needed(program, why, error) from None


def _needed(program: str, why: str, error: Exception) -> TracerError:
    """Return the error of a program whose function, as `why` says, needs a value while JAX traces it."""
    return TracerError(
        f"{why} needs the value{_type_in(error)} of the program {program!r}, in {_line(error)}, but while a "
        "program is traced its values do not exist yet. Move this into a pw.jit function (there with jnp.where "
        "or jax.lax.cond instead of if), choose between pw.jit functions with pw.cond, make it a static "
        "argument of the program, or return the value and use it outside"
    )


@contextlib.contextmanager
def naming_mapped_axes() -> Iterator[None]:
    """In the block, errors of `jax.pmap` about arguments become `ArgumentError`."""
    try:
        yield
    except ValueError as error:
        for frame, _ in walk_tb(error.__traceback__):
            if is_pmap_call(frame):
                _check_mapped_axes(frame.f_locals, _line(error))
        raise


def _check_mapped_axes(call: Mapping[str, Any], line: str) -> None:
    """Raise ArgumentError if an argument of a call of a `jax.pmap` function has another size than wanted."""
    if "cached" not in call:
        return
    devices = call["cached"].mesh.size
    pairs = zip(call["dyn_args_flat"], call["cached"].in_specs_flat, strict=True)
    for number, (value, spec) in enumerate(pairs):
        shape, axis = np.shape(value), len(spec) - 1
        if axis >= 0 and (axis >= len(shape) or shape[axis] != devices):
            raise ArgumentError(
                f"array {number} of the arguments of a function of jax.pmap, called in {line}, has the shape "
                f"{shape}, but its mapped axis {axis} has to hold one slice for each of {devices} devices"
            ) from None


def check_constants(program: str, constants: Sequence[Any]) -> None:
    """Raise TracerError if a program uses a value that another program, or a branch, has made."""
    for value in constants:
        if isinstance(value, jax.core.Tracer):
            raise TracerError(
                f"{program!r} uses a value {value.aval.str_short()} that another program, or a branch of a "
                "pw.cond, has made; outside of it the value may not exist. Return it from both branches, or "
                "return it from the program, and use what that returned"
            )


def _type_in(error: Exception) -> str:
    match = re.search(r"traced array with shape (\S+?)\.?(\s|$)|[Tt]racer\((\S+?)\)", str(error))
    return "" if match is None else f" {match[1] or match[3]}"


def _line(error: Exception) -> str:
    """Return the user's line that raised an error."""
    at: TracebackType | None = error.__traceback__
    place = "an unknown line"
    while at is not None:
        name = str(at.tb_frame.f_globals.get("__name__", ""))
        if not name.startswith(_NOT_USERS):
            code = at.tb_frame.f_code
            place = f"{code.co_qualname} ({code.co_filename}:{at.tb_lineno})"
        at = at.tb_next
    return place
