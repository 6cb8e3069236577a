"""Host values in programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pw.client.arrays.array import Array
from pw.client.arrays.signature import ArrayType, host_value
from pw.client.computations.export import constant
from pw.core.messages import INLINE_BYTES
from pw.core.sharding import ArraySpec


@dataclass(slots=True, eq=False)
class Constant:
    """A host value that the function has made or closed over."""

    value: Any
    _uploaded: dict[ArraySpec, Array] = field(default_factory=dict)

    def placed(self, type_: ArrayType, own: bool) -> Array | bytes | np.ndarray[Any, Any]:
        """Return the value for every run: a large one is uploaded once, unless each run donates its own."""
        if type_.size_bytes <= INLINE_BYTES:
            return host_value(self.value, type_).tobytes()
        if own:
            return host_value(self.value, type_).copy()
        uploaded = self._uploaded.get(type_.spec)
        if uploaded is None:
            uploaded = self._uploaded[type_.spec] = constant(self.value, type_)
        return uploaded
