"""Functions of the API that answer a wrong keyword with the nearest right one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from pw.core.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")


def checks_keywords(fun: Callable[P, R]) -> Callable[P, R]:
    """Have `fun` raise ArgumentError, with the nearest right name, for a keyword that it does not have."""
    names = [
        parameter.name
        for parameter in inspect.signature(fun).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and parameter.name != "self"
    ]
    shown = fun.__qualname__.removesuffix(".__init__").rpartition(".")[2]  # a class by its name

    @functools.wraps(fun)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in names:
                from pw.core.near import did_you_mean  # late: each process of JAX imports `pw.jax`

                raise ArgumentError(f"{shown} has no argument {name}=; {did_you_mean(name, names)}")
        return fun(*args, **kwargs)

    return checked
