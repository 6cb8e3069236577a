"""`pw.show`: draws an array, a sharding, a mesh or a function, in terminals and in notebooks."""

from __future__ import annotations

import importlib
from typing import Any

from pw.client.arrays.of_jax import own_mesh, own_sharding
from pw.client.display.tables import Shown, is_notebook
from pw.client.display.tables import show as print_it
from pw.core.errors import ArgumentError


def show(what: Any) -> None:
    """Draw where something lies: the shards of an array by device, a program by slice, a mesh by island.

    It asks the cluster nothing and waits for no value. A terminal shows text with colours, and a notebook
    HTML, as it does for the last value of a cell; a file or pipe gets plain text. The answers of `pw.status`,
    `pw.memory` and `pw.plan`, and profiles of `pw.profile`, can be shown, too.

    Args:
        what: a `pw.Array` of any number of dimensions, a `pw.NamedSharding`, a `pw.Mesh`, a function of
            `pw.jit` or `pw.program` that was called, or what `lower` of a program returns.

    Raises:
        ArgumentError: it is none of these, or a function that was not called.
    """
    drawing = drawing_of(what)
    if drawing is None and not isinstance(what, Shown):
        raise ArgumentError(
            f"pw.show was given {type(what).__name__}; it draws pw arrays, shardings, meshes and functions of "
            "pw.jit or pw.program"
        )
    shown = what if drawing is None else drawing
    if is_notebook():
        importlib.import_module("IPython.display").display(shown)
    else:
        print_it(shown)


def drawing_of(what: Any) -> Any:
    """Return the drawing of something; None if it has none."""
    draw = getattr(own_mesh(what) or own_sharding(what) or what, "_drawing", None)
    return None if draw is None else draw()


def html(what: Any) -> str | None:
    """Return what a cell shows of a mesh or a sharding; None for the usual text, if it is not of pw."""
    drawing = drawing_of(what)
    return None if drawing is None else str(drawing._repr_html_())
