"""`CallTape`: what a recorder tells of a function that is differentiated (`pw.client.gradients`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pw.client.trace.branch import Branch
from pw.client.trace.tracer import ProgramTracer


class CallTape(Protocol):
    """Records the calls of a function that is differentiated."""

    outer: CallTape | None
    """The tape of the function around it."""

    def takes(self, leaves: Sequence[Any]) -> bool:
        """Whether one of the values depends on what the function is differentiated by."""

    def call(self, function: Any, key: Any, leaves: Sequence[Any]) -> Any:
        """Add a call of a `pw.jit` function to the program, so that it can be differentiated."""

    def alias(self, made: ProgramTracer, source: ProgramTracer) -> None:
        """Say that two tracers are the same value."""

    def merge(
        self,
        branches: tuple[Branch, Branch],
        sides: Sequence[Sequence[ProgramTracer]],
        results: Sequence[ProgramTracer],
    ) -> None:
        """Say which values of two branches were merged."""

    def divide(self, whole: ProgramTracer, parts: Sequence[ProgramTracer]) -> None:
        """Say which values are the parts that islands have of a value."""

    def join(self, parts: Sequence[ProgramTracer], whole: ProgramTracer) -> None:
        """Say which value was put together from parts that islands have."""
