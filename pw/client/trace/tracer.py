"""`ProgramTracer`: a value of a program while the program is traced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pw.client.arrays.sharding import OwnSharding
from pw.client.arrays.signature import ArrayType
from pw.core.programs.program import ValueRef


@dataclass(slots=True, eq=False, repr=False)
class ProgramTracer:
    """A value of a program while the program is traced: a shape and a dtype, without elements."""

    aval: Any
    _type: ArrayType | None
    _value: ValueRef | None
    _leaf: Any
    _moved: object = None
    counts: Any = None
    """The counts of rows of a `Ragged`: where the value moves, only rows that count do."""

    shape = property(lambda self: tuple(self.aval.shape))
    dtype = property(lambda self: self.aval.dtype)
    ndim = property(lambda self: len(self.aval.shape))
    size = property(lambda self: int(self.aval.size))
    weak_type = property(lambda self: bool(self.aval.weak_type))

    @property
    def sharding(self) -> OwnSharding | None:
        """The value's sharding; None for a host value, which its consumers place."""
        return None if self._type is None else self._type.sharding

    @property
    def identity(self) -> object:
        """The key of the value for donation; None for a host value, which each consumer uploads for itself."""
        return self._value if self._moved is None else self._moved

    @property
    def signature(self) -> Any:
        """The type of an array, or the aval of a host value."""
        return self.aval if self._type is None else self._type


@dataclass(slots=True, eq=False, repr=False)
class JoinedTracer(ProgramTracer):
    """A value over a mesh that joins islands: the part of each island."""

    parts: tuple[ProgramTracer, ...] = ()

    @property
    def identity(self) -> object:
        """The first part's; parts are donated together."""
        return self.parts[0].identity
