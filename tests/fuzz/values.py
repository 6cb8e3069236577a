"""Valid values of the types that messages are made of."""

from __future__ import annotations

import enum
import random
import types
import typing
from typing import Any

import msgspec

from pw.core import messages
from pw.core.compact import Compact, Ranges
from pw.transport.links import codec

KINDS = messages.REMOTE


def value_of(kind: Any, rng: random.Random) -> Any:
    """Return a value of a type."""
    simple = {
        int: lambda: rng.choice((0, 1, 2, 300, 1 << 41)),
        float: lambda: rng.choice((0.0, 1.5)),
        str: lambda: rng.choice(("", "x", "int64", "/tmp/some/path")),
        bytes: lambda: rng.randbytes(rng.choice((0, 3, 32))),
        bool: lambda: rng.random() < 0.5,
        types.NoneType: lambda: None,
    }
    if kind in simple:
        return simple[kind]()
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return rng.choice(list(kind))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind, include_extras=True)
        return kind(*[value_of(hints[name], rng) for name in kind.__struct_fields__])
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return within(value_of(args[0], rng), args[1:])
    if isinstance(origin, type) and issubclass(origin, Compact):
        return Compact(value_of(args[0], rng), (value_of(Ranges, rng),))
    if origin in (types.UnionType, typing.Union):
        return value_of(rng.choice(args), rng)
    if origin is tuple and args[1:] == (...,):
        return tuple([value_of(args[0], rng) for _ in range(rng.choice((0, 1, 2)))])
    if origin is tuple:
        return tuple([value_of(part, rng) for part in args])
    if origin is dict:
        return {value_of(args[0], rng): value_of(args[1], rng)}
    raise AssertionError(f"no value for {kind}")


def within(value: Any, marks: tuple[object, ...]) -> Any:
    """Return the value, or the nearest number within bounds; lengths of 2 and strings of 32 are within all."""
    for bound in (mark for mark in marks if isinstance(mark, msgspec.Meta)):
        least, most = bound.ge if bound.gt is None else bound.gt + 1, bound.le
        value = value if least is None else max(value, least)
        value = value if most is None else min(value, most)
    return value


def frames(each: int) -> list[bytes]:
    """Return so many frames with each kind of message."""
    rng = random.Random(1)
    return [
        codec.encode_frame(number, [("to", "from", value_of(kind, rng))])
        for kind in KINDS
        for number in range(each)
    ]
