"""The program from the Pathways paper, as it is printed there.

Run it: `python examples/quickstart.py`. It runs on the cluster of PW_ADDRESS. Without PW_ADDRESS,
`pw` starts a cluster and stops it when the script ends.
"""

import jax
import numpy

import pw


def get_devices(n):
    """Allocates `n` virtual TPU devices on an island."""
    device_set = pw.make_virtual_device_set()
    return device_set.add_slice(tpu_devices=n).tpus


a = jax.pmap(lambda x: x * 2.0, devices=get_devices(2))
b = jax.pmap(lambda x: x + 1.0, devices=get_devices(2))
c = jax.pmap(lambda x: x / 2.0, devices=get_devices(2))


@pw.program  # program tracing (optional)
def f(v):
    x = a(v)
    y = b(x)
    z = a(c(x))
    return (y, z)


print(f(numpy.array([1.0, 2.0])))
# (array([3., 5.], dtype=float32), array([2., 4.], dtype=float32))
