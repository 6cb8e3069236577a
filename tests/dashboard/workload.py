"""A client for the browser test, which works until it is ended: `workload NAME ISLAND ISLAND`.

Two stages on two islands, each a gang over all devices of its island, with an edge between them.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pw

SIZE = 256


def main(name: str, first: str, second: str) -> None:
    """Run steps for ever."""
    pw.connect()
    devices = pw.make_virtual_device_set()
    count = {one.name: one.devices for one in pw.status().islands}
    slices = [devices.add_slice(count[island], island=island) for island in (first, second)]

    def forward(x: Any) -> Any:
        return jax.lax.pmean(jnp.tanh(x @ x), "i")

    def loss(x: Any) -> Any:
        return jnp.sin(x @ x.T) * 1e-2 + jax.lax.pmean(x, "i")

    forward.__name__, loss.__name__ = f"{name}_forward", f"{name}_loss"
    stages = [
        pw.pmap(function, axis_name="i", devices=part.tpus)
        for function, part in zip((forward, loss), slices, strict=True)
    ]

    def step(x: Any) -> Any:
        return stages[0](stages[1](stages[0](x)))

    step.__name__ = f"{name}_step"
    run = pw.program(step)
    x = np.full((count[first], SIZE, SIZE), 1e-3, np.float32)
    ahead = [run(x)]
    while True:
        ahead.append(run(ahead[-1]))
        if len(ahead) > 8:
            ahead.pop(0).block_until_ready()


if __name__ == "__main__":
    main(*sys.argv[1:])
