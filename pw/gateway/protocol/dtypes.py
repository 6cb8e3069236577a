"""The dtypes of JAX's remote protocol by their numbers there."""

from __future__ import annotations

from functools import cache

from pw.core.dtypes import BY_XLA
from pw.core.errors import ArgumentError
from pw.gateway.protocol import protos

STRING = "string"
"""The dtype of a string that a Python function returns (`colocated`); there are no other strings."""


@cache
def _by_number() -> dict[int, str]:
    kinds = protos.enum("xla.ifrt.DTypeProto.Kind")
    return {
        number: BY_XLA[kind.removeprefix("KIND_")]
        for kind, number in kinds.items()
        if kind.removeprefix("KIND_") in BY_XLA
    }


@cache
def name_of(kind: int) -> str:
    """Return the dtype's name of a `DTypeProto.Kind`. Raises ArgumentError if pw does not know it."""
    name = _by_number().get(kind)
    if name is None:
        raise ArgumentError(
            f"arrays of the dtype number {kind} of JAX's protocol are not supported"
        )
    return name


@cache
def kind_of(name: str) -> int:
    """Return the `DTypeProto.Kind` of a dtype's name."""
    if name == STRING:
        return protos.enum("xla.ifrt.DTypeProto.Kind")["KIND_STRING"]
    return next(number for number, own in _by_number().items() if own == name)
