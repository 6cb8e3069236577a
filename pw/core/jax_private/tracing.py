"""What JAX knows while it traces: its configuration, the values inside tracers, lines of the user's code."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from jax._src import config, core, source_info_util
from jax._src.interpreters import ad, batching, partial_eval

outside_traces: Callable[[], bool] = core.trace_ctx.is_top_level
"""Whether no JAX transformation is under way in this thread. Public: none."""
trace_context: Callable[[], Hashable] = config.trace_context
"""Return the part of JAX's configuration that traces depend on. Public: none."""
debug_nans: Any = config.debug_nans
"""The setting `jax_debug_nans`, with overrides of this thread. Public: `jax.config.jax_debug_nans`."""
user_frames = source_info_util.user_frames
"""Yield the user's frames of a traceback, innermost first.

Public: `jax.extend.source_info_util.summarize`, one line of text.
"""


def without_lines() -> AbstractContextManager[Any]:
    """Return a context in which lowered modules have no lines of the user's code. Public: none."""
    context: AbstractContextManager[Any] = config.traceback_in_locations_limit(0)
    return context


def innermost(value: Any) -> Any:
    """Return the value that transformations of JAX have wrapped; for an argument of a jaxpr, its variable.

    Public: none.
    """
    while (inner := _inside(value)) is not None:
        value = inner
    if isinstance(value, partial_eval.DynamicJaxprTracer):
        atom = value.val
        return value if isinstance(atom, core.Literal) or value.parent else atom
    return value


def _inside(value: Any) -> Any:
    """Return what a transformation of JAX has wrapped; None for other values."""
    if isinstance(value, (ad.JVPTracer, ad.LinearizeTracer)):
        return value.primal
    if isinstance(value, batching.BatchTracer):
        return value.val
    if isinstance(value, partial_eval.JaxprTracer) and value.is_known():
        return value.pval.get_known()
    return None


def is_pmap_call(frame: FrameType) -> bool:
    """Whether a frame is a call of a `jax.pmap` function, before it is traced. Public: none."""
    return frame.f_globals.get("__name__") == "jax._src.pmap" and frame.f_code.co_name == "wrapped"
