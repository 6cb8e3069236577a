"""Removes the frames of pw from tracebacks of errors that a user's function raises; JAX removes its own."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import jax


def leave_out_runtime(error: BaseException) -> None:
    """Remove the frames of pw from the traceback of `error`, unless pw raised it; a bare `raise` follows.

    With `JAX_TRACEBACK_FILTERING=off` they stay.
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
