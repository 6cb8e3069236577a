"""`f.lower(x)`: what is sent of a `pw.jit` function or a program, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import mlir

from pw.client.computations.export import Traced
from pw.client.computations.joined import JoinedTraced
from pw.client.display.graph import ProgramDrawing
from pw.client.programs.passes.residuals import with_fewer_residuals
from pw.client.programs.writing.builder import ProgramBuilder
from pw.client.programs.writing.values import PlacedValue
from pw.core.errors import ArgumentError, TracingError
from pw.core.jax_private.stablehlo import parsed
from pw.core.programs.stablehlo import decode
from pw.core.programs.text import text_of


class Lowered:
    """A function for one kind of arguments, ready to be sent to its hosts."""

    def __init__(self, traced: Traced | JoinedTraced) -> None:
        self._traced = traced
        self._pieces = traced.pieces if isinstance(traced, JoinedTraced) else (traced,)
        self._name = traced.name if isinstance(traced, JoinedTraced) else traced.computation.name

    def __repr__(self) -> str:
        return f"<{self._name} lowered for {self._traced.mesh!r}>"

    def as_text(self) -> str:
        """The StableHLO that is compiled on the hosts; over several islands, the module of each piece.

        Raises:
            TracingError: the function runs as Python there.
        """
        if any(piece.computation.traits.runs_on_host for piece in self._pieces):
            raise TracingError(
                f"{self._name!r} is a host function: it runs as Python on its hosts, and "
                "has no other form"
            )
        return "\n".join(map(_text, self._pieces))

    @property
    def out_info(self) -> Any:
        """The tree of results, as `jax.ShapeDtypeStruct`s with their shardings."""
        return jax.tree_util.tree_unflatten(
            self._traced.tree,
            [
                jax.ShapeDtypeStruct(
                    type_.aval.shape, type_.aval.dtype, sharding=type_.sharding.of_jax
                )
                for type_ in self._traced.outputs
            ],
        )

    def compile(self) -> Any:
        """Raises; the hosts compile."""
        raise TracingError(
            f"{self._name!r} is compiled on its hosts, when it is first called: call "
            "the function itself"
        )


class LoweredProgram:
    """A program for one kind of arguments, after each of its passes."""

    def __init__(
        self, closed: Any, builder: ProgramBuilder, outputs: Sequence[PlacedValue], tree: Any
    ) -> None:
        self._closed = closed
        self._name = builder.name
        self._program = builder.program(outputs, tree)
        self._runtime = builder.runtime

    def _repr_html_(self) -> str:
        return self._drawing()._repr_html_()

    def _drawing(self) -> ProgramDrawing:
        """Return the computations by slice."""
        return ProgramDrawing.of(self._program, lambda slice: self._runtime.island(slice))

    def __repr__(self) -> str:
        return f"<program {self._name} lowered, {len(self._program.nodes)} computations>"

    def as_text(self, after: str = "place") -> str:
        """Return the program after a pass.

        Args:
            after: "trace", the jaxpr that JAX makes of the function; "residuals", the jaxpr in which backward
                halves take less of forward halves; or "place", the computations on their slices.

        Raises:
            ArgumentError: there is no such pass.
        """
        if after == "place":
            return text_of(self._program)
        if after == "residuals":
            return str(with_fewer_residuals(self._closed.jaxpr))
        if after == "trace":
            return str(self._closed)
        raise ArgumentError(f"a program has no pass {after!r}; choose trace, residuals or place")


def _text(traced: Traced) -> str:
    with mlir.make_ir_context():
        module = parsed(decode(traced.artifact).module)
        return str(module.operation.get_asm(enable_debug_info=False))
