"""Unmodified JAX on the session's virtual devices.

    PW_ADDRESS=tcp://… JAX_PLATFORMS=pw python script.py

or, before the first use of JAX, `import pw.jax; pw.jax.connect()`. Then `jax.devices()` are virtual
devices of the cluster (without an address: of the embedded one), and everything in JAX runs there.
JAX finds this module by its entry point in the group `jax_plugins`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from pw.core.errors import Error

__all__ = ["connect", "initialize"]

PLATFORM = "pw"
_arguments: list[str] = []
"""Those of `pw gateway`."""


def initialize() -> None:
    """Register the platform `pw` with JAX, if it was asked for; called by JAX when it looks for plugins."""
    import jax

    asked: str = jax.config.jax_platforms or ""  # type: ignore[attr-defined]
    if PLATFORM in asked.split(","):
        _register()
        _add_cpu(asked)


def connect(
    address: str | None = None,
    *,
    devices: int | None = None,
    islands: int | Sequence[str] | None = None,
    share: float = 1.0,
    priority: int = 0,
) -> None:
    """Make JAX use virtual devices of a cluster; call it before the first use of JAX.

    Args:
        address: as of `pw.connect`.
        devices: how many devices, over all islands; `PW_DEVICES`, else all there are.
        islands: how many islands, or their names; `PW_ISLANDS`, else all there are.
        share: weight of this client under `pw-controller --policy share`.
        priority: importance of this client under `pw-controller --policy priority`.

    Raises:
        Error: JAX has chosen its devices already.
        ConnectionFailed: no controller answers at the address.
    """
    from jax._src import xla_bridge

    if xla_bridge.backends_are_initialized():
        raise Error(
            "JAX has its devices already; call pw.jax.connect() before the first use of JAX, or start the "
            "script with JAX_PLATFORMS=pw"
        )
    names = str(islands) if isinstance(islands, int) else ",".join(islands or ())
    _arguments[:] = [
        *("--address", address or os.environ.get("PW_ADDRESS", "")),
        *("--devices", str(devices or 0)),
        *("--islands", names),
        *("--share", str(share)),
        *("--priority", str(priority)),
    ]
    import jax

    _register()
    _add_cpu(PLATFORM)
    jax.config.update("jax_platforms", PLATFORM)
    jax.devices()


def _add_cpu(platforms: str) -> None:
    """Keep this machine's CPU as a second platform, as beside any accelerator: `jax.devices("cpu")`."""
    from jax._src import xla_bridge

    # An alias: the user's setting of jax_platforms stays as it is.
    if "cpu" not in platforms.split(","):
        xla_bridge._alias_to_platforms[PLATFORM] = [PLATFORM, "cpu"]


def _register() -> None:
    from jax._src import xla_bridge

    if PLATFORM not in xla_bridge._backend_factories:
        xla_bridge.register_backend_factory(PLATFORM, _backend, priority=-1, fail_quietly=False)


def _backend() -> Any:
    """Return JAX's client of the gateway in this process."""
    from pw.core import installed

    installed.check()
    installed.check_extra("jax", "hpack", "google.protobuf")
    from pw.gateway import beside

    return beside.client(_arguments or ["--address", os.environ.get("PW_ADDRESS", "")])
