"""The dtypes of JAX's remote protocol under their names in numpy and ml_dtypes."""

from __future__ import annotations

from functools import cache

from pw.core.errors import ArgumentError
from pw.gateway import protos

_NAMES = {
    "PRED": "bool",
    **{f"S{bits}": f"int{bits}" for bits in (1, 2, 4, 8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (1, 2, 4, 8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
    "C64": "complex64",
    "C128": "complex128",
    "F4E2M1FN": "float4_e2m1fn",
    "F8E3M4": "float8_e3m4",
    "F8E4M3": "float8_e4m3",
    "F8E4M3B11FNUZ": "float8_e4m3b11fnuz",
    "F8E4M3FN": "float8_e4m3fn",
    "F8E4M3FNUZ": "float8_e4m3fnuz",
    "F8E5M2": "float8_e5m2",
    "F8E5M2FNUZ": "float8_e5m2fnuz",
    "F8E8M0FNU": "float8_e8m0fnu",
}

STRING = "string"
"""The dtype of a string that a Python function returns (`pw.gateway.colocated`); there are no other strings."""


@cache
def _by_number() -> dict[int, str]:
    kinds = protos.enum("xla.ifrt.DTypeProto.Kind")
    return {
        number: _NAMES[kind.removeprefix("KIND_")]
        for kind, number in kinds.items()
        if kind.removeprefix("KIND_") in _NAMES
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
    return next(number for number, known in _by_number().items() if known == name)
