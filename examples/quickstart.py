"""The program from the Pathways paper: three functions on three sets of devices, traced into one.

`a`, `b` and `c` are compiled functions, each placed on two virtual devices of some island.
Calling `f` runs four of them as one dataflow program: the runtime moves the values from placement
to placement, and the call returns at once, with futures for the two results.

Run it: `python -m examples.quickstart`.
"""

from __future__ import annotations

from typing import Any

import numpy

import pw


def get_devices(n: int) -> Any:
    """Allocates `n` virtual devices on an island."""
    device_set = pw.make_virtual_device_set()
    return device_set.add_slice(devices=n).tpus


def run() -> Any:
    """Runs the paper's program on the cluster this process is connected to; returns two futures."""
    a = pw.pmap(lambda x: x * 2.0, devices=get_devices(2))
    b = pw.pmap(lambda x: x + 1.0, devices=get_devices(2))
    c = pw.pmap(lambda x: x / 2.0, devices=get_devices(2))

    @pw.program  # program tracing (optional)
    def f(v: Any) -> tuple[Any, Any]:
        x = a(v)
        y = b(x)
        z = a(c(x))
        return (y, z)

    return f(numpy.array([1.0, 2.0]))


def main() -> None:
    """Starts a cluster of two islands on this machine and prints the two arrays."""
    with pw.LocalCluster(islands=2, hosts_per_island=2, devices_per_host=1):
        print(pw.get(run()))  # (array([3., 5.]), array([2., 4.])), as float32


if __name__ == "__main__":
    main()
