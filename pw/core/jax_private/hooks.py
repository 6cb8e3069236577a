"""Functions inside JAX that pw replaces by its own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from jax._src import callback, debugging, dispatch, dlpack, pjit
from jax._src.numpy import array_constructors
from jaxlib import _jax, xla_client


class Hook(NamedTuple):
    """A place where JAX looks a function up each time that it calls it."""

    owner: Any
    name: str

    @property
    def value(self) -> Any:
        """What JAX finds now."""
        return getattr(self.owner, self.name)

    def replace(self, value: Any) -> None:
        """Let JAX find something else."""
        setattr(self.owner, self.name, value)


BATCHED_DEVICE_PUT = Hook(xla_client, "batched_device_put")
"""Puts shards on devices. Public: none."""
DEVICE_PUT = Hook(dispatch, "_batched_device_put_impl")
"""Does what `jax.device_put` is called for, outside of traced functions. Public: none."""
COST_ANALYSIS = Hook(_jax, "hlo_module_cost_analysis")
"""Estimates the costs of a module that is not compiled. Public: none."""
FASTPATH = Hook(pjit, "_get_fastpath_data")
"""Says how a function is called again without Python; None if it must not be. Public: none."""
PYTHON_CALLBACK = Hook(callback, "emit_python_callback")
"""Lowers a call of a Python function, for `jax.pure_callback` and others. Public: none."""
CLIENTS = Hook(callback, "xb"), Hook(debugging, "xla_bridge"), Hook(dlpack, "xla_bridge")
"""The module with JAX's clients, where modules of JAX ask it for this process's memory. Public: none."""


def wrap_array_conversions(wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace each function to which `jnp.array` gives its value by `wrapped` of it. Public: none."""
    module: Any = array_constructors
    own = {name: wrapped(getattr(module.lax, name)) for name in ("stage", "_convert_element_type")}
    module.lax = SimpleNamespace(**(vars(module.lax) | own))
