"""Functions that call the script in all places where people put that; run it to see values and calls.

Arguments are names of some of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LIKE = jax.ShapeDtypeStruct((), np.float32)
seen: list[Any] = []


def note(*values: Any) -> None:
    """Call the script with values, unordered."""
    jax.debug.callback(
        lambda *each: seen.append([np.round(one, 2).tolist() for one in each]), *values
    )


def noted(value: Any, like: Any) -> Any:
    """Call the script with a value, and return what it gives, which is twice the value."""
    like = jax.ShapeDtypeStruct(like.shape, like.dtype)
    return jax.pure_callback(lambda v: np.asarray(v) * 2, like, value)


def and_note(value: Any, *values: Any) -> Any:
    """Return a value."""
    note(*values)
    return value


def bounded(value: Any) -> Any:
    """Return a value that is checked."""
    return eqx.error_if(value, value > 100, "too large")


def branches(y: Any) -> Any:
    """Call in one of three branches, of which one has a collective."""
    return jax.lax.switch(
        jnp.int32(y[1]) % 3,
        [
            lambda c: and_note(c, 1, c.sum()),
            lambda c: and_note(c, 2, c.max()) - c.mean(),
            lambda c: and_note(c, 3, c[5]) * 2,
        ],
        y,
    )


def steps(y: Any) -> Any:
    """Call in a branch inside of a counted loop."""

    def step(c: Any, at: Any) -> tuple[Any, Any]:
        c = jax.lax.cond(
            c.sum() > at, lambda c: and_note(c, c.sum()) - 1, lambda c: c + c.mean(), c
        )
        return c, c.max()

    return jax.lax.scan(step, y, jnp.arange(3.0))


KINDS: dict[str, Callable[[Any], Any]] = {
    "an element": lambda y: and_note(y, y[0]) + 1,
    "an element by its index": lambda y: and_note(y, y[jnp.argmax(y)]) + 1,
    "some elements": lambda y: and_note(y, y[2:7]) + 1,
    "map": lambda y: jax.lax.map(lambda r: and_note(r, r) * 2, y),
    "vmap": jax.vmap(lambda r: and_note(r, r) * 2),
    "vmap of a branch": jax.vmap(
        lambda r: jax.lax.cond(r > 4, lambda v: and_note(v, v) * 2, lambda v: v, r)
    ),
    "vmap of a loop": jax.vmap(
        lambda r: jax.lax.while_loop(lambda c: c < 10, lambda c: and_note(c, c) * 1.5 + 1, r)
    ),
    "vmap of a function that returns": jax.vmap(
        lambda r: jax.pure_callback(lambda w: w * 2, LIKE, r, vmap_method="sequential")
    ),
    "map of a branch": lambda y: jax.lax.map(
        lambda r: jax.lax.cond(r > 3, lambda r: and_note(r, r) * 2, lambda r: r, r), y
    ),
    "map, in order": lambda y: jax.lax.map(
        lambda r: [r * 2, io_callback(lambda v: seen.append(float(v)), None, r, ordered=True)][0], y
    ),
    "scan": lambda y: jax.lax.scan(lambda c, r: (c + r, and_note(r, r) * 2), 0.0, y),
    "scan of a function that returns": lambda y: jax.lax.scan(
        lambda c, i: (c + noted(c, c).mean(), c.sum()), y, jnp.arange(3.0)
    ),
    "scan of a branch": steps,
    "fori_loop": lambda y: jax.lax.fori_loop(0, 3, lambda i, v: and_note(v, i, v[i]) + v.sum(), y),
    "while_loop of a function that returns": lambda y: jax.lax.while_loop(
        lambda v: (v < 10).any(), lambda v: v * 1.5 + 1 + 0 * noted(v.sum(), LIKE), y
    ),
    "while_loop that is checked": jax.vmap(
        lambda r: jax.lax.while_loop(lambda c: c < 10, lambda c: bounded(c * 1.5 + 1), r)
    ),
    "a branch": lambda y: jax.lax.cond(y[3] > 0, lambda v: and_note(v, v[2]) * 2, lambda v: v, y),
    "a branch that returns": lambda y: jax.lax.cond(
        y.sum() > 3, lambda c: noted(c, c) - c.mean(), lambda c: c, y
    ),
    "branches": branches,
    "gradients": jax.grad(lambda y: (lambda s: and_note(s, s))((y**2).sum())),
    "gradients, computed again": jax.grad(
        lambda y: jax.checkpoint(lambda w: and_note(jnp.sin(w).sum(), w[0]))(y)
    ),
}
FEW = (
    "an element",
    "map",
    "vmap of a branch",
    "scan of a function that returns",
    "while_loop of a function that returns",
    "while_loop that is checked",
    "fori_loop",
    "branches",
)
"""One of each way in which a call is divided."""


def run(devices: Sequence[Any], kinds: Sequence[str]) -> Iterator[list[Any]]:
    """Yield of each function its name, what it returns, and what it has called."""
    mesh = Mesh(np.array(devices), ("d",))
    x = jax.device_put(np.arange(1, 17, dtype=np.float32), NamedSharding(mesh, P("d")))
    for kind in kinds:
        seen.clear()
        made = jax.tree.leaves(jax.jit(KINDS[kind])(x))
        values = [np.round(np.asarray(one, np.float64), 3).tolist() for one in made]
        jax.effects_barrier()
        calls = seen if "order" in kind else sorted(seen, key=str)
        yield [kind, values, list(calls)]


if __name__ == "__main__":
    for found in run(jax.devices(), sys.argv[1:] or list(KINDS)):
        print(json.dumps(found), flush=True)
