"""`ProgramTracer`: a value of a program while the program is traced."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from pw.client.arrays import jaxtype
from pw.client.arrays.indexing import elements, item_at
from pw.client.arrays.methods import Methods
from pw.client.arrays.sharding import NamedSharding
from pw.client.arrays.signature import ArrayType
from pw.core.errors import TracerError
from pw.core.programs.program import ValueRef


def value_is_needed(why: str, value: str, program: str, line: str) -> TracerError:
    """Return the error of a function that needs a value of a program which is traced.

    Args:
        why: what the function does.
        value: in words.
        program: its name.
        line: of the user.
    """
    return TracerError(
        f"{why} needs {value} of the program {program!r}, in {line}, but while a program is traced its "
        "values do not exist yet. Move this into "
        "a pw.jit function (there with jnp.where or jax.lax.cond instead of if), "
        "choose between pw.jit functions with pw.cond, "
        "make it a static argument of the program, or return the value and use it outside"
    )


class Named(Protocol):
    """The recorder of a program."""

    name: str


@dataclass(slots=True, eq=False, repr=False)
class ProgramTracer(Methods):
    """A value of a program while the program is traced: a shape and a dtype, without elements."""

    recorder: Named
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
    def sharding(self) -> NamedSharding | None:
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

    def __repr__(self) -> str:
        return f"ProgramTracer({self.aval.str_short()}, program={self.recorder.name!r})"

    def __len__(self) -> int:
        if not self.aval.shape:
            raise TypeError("len() of unsized object")
        return int(self.aval.shape[0])

    def _needed(self, why: str) -> NoReturn:
        value = f"the value {self.aval.str_short()}"
        raise value_is_needed(why, value, self.recorder.name, _user_line())

    def __bool__(self) -> bool:
        self._needed("bool() (an if, while, and, or, or assert)")

    def __int__(self) -> int:
        self._needed("int()")

    def __float__(self) -> float:
        self._needed("float()")

    def __complex__(self) -> complex:
        self._needed("complex()")

    def __index__(self) -> int:
        self._needed("using it as an index or a count")

    def __iter__(self) -> Any:
        return elements(self)

    def __getitem__(self, index: Any) -> Any:
        return item_at(self, index)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        self._needed("conversion to numpy")

    def __jax_array__(self) -> NoReturn:
        self._needed("a jax function outside of pw.jit, or a function that closes over it,")

    _as_jax_array = __jax_array__

    @property
    def format(self) -> Any:
        """Read by JAX before it computes on this machine; raises."""
        return self.__jax_array__()

    def item(self) -> Any:
        """Raises: values do not exist while a program is traced."""
        self._needed("item()")

    tolist = item


@dataclass(slots=True, eq=False, repr=False)
class JoinedTracer(ProgramTracer):
    """A value over a mesh that joins islands: the part of each island."""

    parts: tuple[ProgramTracer, ...] = ()

    @property
    def identity(self) -> object:
        """The first part's; parts are donated together."""
        return self.parts[0].identity


# Registered so that JAX calls `__jax_array__`, which raises: JAX would reword an error from the aval.
jaxtype.register(ProgramTracer, lambda tracer: tracer.aval, lambda tracer: tracer.__jax_array__())


jaxtype.register(JoinedTracer, lambda tracer: tracer.aval, lambda tracer: tracer.__jax_array__())


def _user_line() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("pw.client", "jax", "numpy")
    ):
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})"
