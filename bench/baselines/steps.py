"""The computation that all contenders run: the paper's scalar all-reduce followed by a scalar addition.

Each device holds one element; a step replaces it by the mean of all, plus one. So the value tells how many
steps were done, in all processes. The local step leaves the mean out and shows what dispatch alone costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

FUSED = 128
AXIS = "hosts"


def together(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A step of one device's element, as a function of the whole array; takes its mesh from where it runs."""
    return lambda x: jax.shard_map(step, in_specs=P(AXIS), out_specs=P(AXIS))(x)


def all_reduce(x: Any) -> Any:
    """Mean over all devices, plus one."""
    return jax.lax.pmean(x, AXIS) + 1


def all_reduce_fused(x: Any) -> Any:
    """`FUSED` of them in one computation."""

    def body(_: Any, value: Any) -> Any:
        # pmean makes its result equal everywhere; the loop wants what it was given back.
        return jax.lax.pcast(all_reduce(value), AXIS, to="varying")

    return jax.lax.fori_loop(0, FUSED, body, x)


def local(x: Any) -> Any:
    """Plus one."""
    return x + 1
