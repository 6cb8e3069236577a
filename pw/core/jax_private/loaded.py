"""What JAX has in this process, if the process has imported it; imports no jax."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def clients() -> Mapping[str, Any]:
    """Return JAX's clients by platform; makes none. Public: `jax.extend.backend.backends` makes them."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return {} if bridge is None else bridge._backends
