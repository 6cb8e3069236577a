"""JAX's backend in this process, if its devices are virtual devices of a cluster (`pw.gateway`)."""

from __future__ import annotations

import os
import sys
from typing import Any

from pw.core.jax_private import loaded

_NAMES = ("pw", "proxy")
"""The platforms as which JAX knows a gateway: `pw.jax`, and JAX_PLATFORMS=proxy."""
_RUNTIME = "proxy/pw"


def client() -> Any:
    """Return JAX's client of a gateway of pw; None if JAX has none, or has not chosen its devices yet."""
    clients = loaded.clients()
    for name in _NAMES:
        backend = clients.get(name)
        if backend is not None and backend.runtime_type == _RUNTIME:
            return backend
    return None


def cluster() -> str | None:
    """Return the address of the controller whose devices JAX has, or is to have, in this process.

    Has JAX choose its devices if the platform `pw` was asked for. None if they are no devices of a cluster.
    """
    jax = sys.modules.get("jax")
    asked = os.environ.get("JAX_PLATFORMS", "") if jax is None else jax.config.jax_platforms or ""
    if "pw" in asked.split(","):
        import jax as chosen

        chosen.devices()
    backend = client()
    return None if backend is None else backend.devices()[0].pw_cluster or None
