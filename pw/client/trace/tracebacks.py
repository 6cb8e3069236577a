"""Tracebacks of a user's errors without the frames of the runtime in between.

An error that a user's function raises while it is traced belongs to that function. Between the line that called
it and the line that failed lie frames of pw, which say nothing; JAX has taken its own out already.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import jax

__all__ = ["leave_out_runtime"]


def leave_out_runtime(error: BaseException) -> None:
    """Take the frames of pw out of the traceback of `error`, unless pw raised it; a bare `raise` follows.

    As JAX does, all of them stay with `JAX_TRACEBACK_FILTERING=off`.
    """
    frames = []
    at = error.__traceback__
    while at is not None:
        frames.append(at)
        at = at.tb_next
    config: Any = jax.config
    if not frames or _is_runtime(frames[-1]) or config.jax_traceback_filtering == "off":
        return
    kept: TracebackType | None = None
    for frame in reversed(frames):
        if not _is_runtime(frame):
            kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    error.__traceback__ = kept


def _is_runtime(at: TracebackType) -> bool:
    return str(at.tb_frame.f_globals.get("__name__")).startswith("pw.client.")
