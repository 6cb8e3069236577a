"""The computation of all contenders: the paper's scalar all-reduce and a scalar addition.

Each device holds one element. A step replaces it by the mean of all elements, plus one, so the
value counts the steps of all processes. The local step leaves out the mean and shows what dispatch
alone costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

FUSED = 128
AXIS = "hosts"


def together(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A step of one device's element, as a function of the whole array on the current mesh."""
    return lambda x: jax.shard_map(step, in_specs=P(AXIS), out_specs=P(AXIS))(x)


def all_reduce(x: Any) -> Any:
    """Mean over all devices, plus one."""
    return jax.lax.pmean(x, AXIS) + 1


def all_reduce_fused(x: Any) -> Any:
    """`FUSED` all-reduces in one computation."""

    def body(_: Any, value: Any) -> Any:
        # pmean returns a value that is equal on all devices; the loop needs the type of its input.
        return jax.lax.pcast(all_reduce(value), AXIS, to="varying")

    return jax.lax.fori_loop(0, FUSED, body, x)


def local(x: Any) -> Any:
    """Plus one."""
    return x + 1


def busy(steps: int) -> Callable[[Any], Any]:
    """A function of an array that keeps a core busy for `steps` steps of about 20 ns."""

    def work(x: Any) -> Any:
        return jax.lax.fori_loop(0, steps, lambda _, value: value * 0.999999 + 1e-6, x)

    return work


def busy_together(steps: int) -> Callable[[Any], Any]:
    """`busy` on each device's element, followed by the all-reduce."""
    return lambda x: all_reduce(busy(steps)(x))


def calls(
    function: Callable[[Any], Any], start: Any, computations: int = 1, *, wait: bool = False
) -> Callable[[int], object]:
    """A case that calls `x = f(x)`; a count is of computations, of which one call runs several.

    It waits for every result, or for the last one only: each wait is a round trip.
    """

    def case(count: int) -> None:
        x = start
        for _ in range(-(-count // computations)):
            x = function(x)
            if wait:
                x.block_until_ready()
        x.block_until_ready()

    return case
