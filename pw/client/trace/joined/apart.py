"""Takes a value over several islands apart, and puts one together, so that gradients flow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pw.client.arrays.sharding import NamedSharding
from pw.client.arrays.signature import ArrayType
from pw.client.trace.tracer import JoinedTracer, ProgramTracer


def apart(recorder: Any, leaf: Any, sharding: NamedSharding) -> list[ProgramTracer]:
    """Return each island's part of a value that gets a sharding over several islands."""
    whole: JoinedTracer = recorder.reshard(leaf, sharding)
    parts = [replace(part) for part in whole.parts]
    if recorder.tape is not None:
        recorder.tape.divide(whole, parts)
    return parts


def together(recorder: Any, parts: Sequence[Any], type_: ArrayType) -> JoinedTracer:
    """Return the value over several islands with these parts."""
    pairs = zip(parts, type_.parts, strict=True)
    own = [recorder.reshard(part, to.sharding) for part, to in pairs]
    whole: JoinedTracer = recorder.joined(type_, own)
    if recorder.tape is not None:
        recorder.tape.join(own, whole)
    return whole
