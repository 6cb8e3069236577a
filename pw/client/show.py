"""`pw.show`: draws an array, a sharding, a mesh or a function, in terminals and in notebooks."""

from __future__ import annotations

import importlib
from typing import Any

from pw.core.errors import ArgumentError
from pw.display.tables import Shown, is_notebook
from pw.display.tables import show as print_it


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
    drawing = getattr(what, "_drawing", None)
    if drawing is None and not isinstance(what, Shown):
        raise ArgumentError(
            f"pw.show was given {type(what).__name__}; it draws pw arrays, shardings, meshes and functions of "
            "pw.jit or pw.program"
        )
    shown = what if drawing is None else drawing()
    if is_notebook():
        importlib.import_module("IPython.display").display(shown)
    else:
        print_it(shown)
