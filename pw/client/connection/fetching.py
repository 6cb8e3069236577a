"""A value on its way from hosts to this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pw.client.connection.waiting import Waiting
from pw.client.session.notes import Part
from pw.client.show.live import About
from pw.core.sharding import ArraySpec, box_slices, dtype_of


class Fetching(Waiting[Any]):
    """A value on its way; put together by the thread that asks for the result."""

    def __init__(
        self,
        spec: ArraySpec,
        explain: Callable[[], str] | None = None,
        about: Callable[[], About] | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(explain, about, before)
        self._spec = spec
        self._whole: np.ndarray[Any, Any] | None = None
        self._parts: list[Part] = []

    def set_result(self, result: list[Part]) -> None:
        """Take the parts; they are kept until the whole is there, and no longer."""
        self._parts = result
        super().set_result(None)

    def result(self, timeout: float | None = None) -> np.ndarray[Any, Any]:
        """The whole value, read-only. Raises the error it failed with, or TimeoutError."""
        super().result(timeout)
        # Looked up first: once they are gone, the whole is there for all threads.
        parts = self._parts
        if self._whole is None:
            self._whole = _assembled(self._spec, parts)
            self._parts = []
        return self._whole


def _assembled(spec: ArraySpec, parts: list[Part]) -> np.ndarray[Any, Any]:
    whole_box = tuple((0, size) for size in spec.shape)
    if len(parts) == 1 and parts[0][0] == whole_box:
        whole = parts[0][1]
    else:
        whole = np.empty(spec.shape, dtype_of(spec.dtype))
        for box, part in parts:
            whole[box_slices(box)] = part
    whole.flags.writeable = False
    return whole
