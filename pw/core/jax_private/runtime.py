"""JAX's clients of devices, and the tokens of effects that are not over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax._src import dispatch, xla_bridge

is_started = xla_bridge.backends_are_initialized
"""Whether JAX has chosen its devices. Public: none."""
make_cpu_client = xla_bridge.make_cpu_client
"""Make JAX's client of CPU devices, with these collectives if there are any. Public: none."""
tokens = dispatch.runtime_tokens
"""The effects of calls. Public: `jax.effects_barrier`, which waits for all, and raises the first error."""


def add_client(platform: str, client: Any) -> None:
    """Let JAX find a client under the name of a platform that has none. Public: none."""
    xla_bridge._backends.setdefault(platform, client)


def add_alias(platform: str, platforms: Sequence[str]) -> None:
    """Let a platform in `jax_platforms` mean these platforms. Public: none."""
    xla_bridge._alias_to_platforms[platform] = list(platforms)


def is_registered(platform: str) -> bool:
    """Whether JAX knows how to make the client of a platform. Public: none."""
    return platform in xla_bridge._backend_factories
