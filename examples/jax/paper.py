"""The program from the Pathways paper in plain JAX.

Run it: `JAX_PLATFORMS=pw python examples/jax/paper.py`. With `--two-islands` the function `b` runs on
another island than `a` and `c`.
"""

import sys

import jax
import numpy


def get_devices(n, island=0):
    """Return `n` devices of an island; of plain JAX's devices, each half is an island."""
    devices = jax.devices()
    if hasattr(devices[0], "island"):
        name = sorted({device.island for device in devices})[island]
        devices = [device for device in devices if device.island == name]
    else:
        half = len(devices) // 2
        devices = devices[island * half :]
    return devices[:n]


there = int("--two-islands" in sys.argv)
a = jax.pmap(lambda x: x * 2.0, devices=get_devices(2))
b = jax.pmap(lambda x: x + 1.0, devices=get_devices(2, there))
c = jax.pmap(lambda x: x / 2.0, devices=get_devices(2))


def f(v):
    x = a(v)
    y = b(x)
    z = a(c(x))
    return (y, z)


print(f(numpy.array([1.0, 2.0])))
# (Array([3., 5.], dtype=float32), Array([2., 4.], dtype=float32))
