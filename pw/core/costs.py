"""What it costs to move bytes: the numbers of the model that chooses the way of each edge.

The numbers of a platform are readings of `bench/transfer.py` and of docs/internals/performance-log.md
where there are any. They need to be right within a factor of two: ways that are closer than that are
equally good.
"""

from __future__ import annotations

from typing import NamedTuple


class Costs(NamedTuple):
    """Seconds; those "a byte" are of one host."""

    message_s: float
    """Seconds that a transfer between hosts takes besides its bytes."""
    shared_byte_s: float
    """Seconds for a byte between two processes of one machine."""
    wire_byte_s: float
    """Seconds for a byte between two machines."""
    copy_byte_s: float
    """Seconds for a byte that a host puts into its place in a new shard; a piece that is the whole shard is not
    copied."""
    stage_byte_s: float
    """Seconds for a byte between the memory of a device and that of its host, either way."""
    launch_s: float
    """Seconds to launch and enqueue a computation."""
    device_byte_s: float
    """Seconds for a byte of a result that XLA writes on devices of one host."""
    collective_s: float
    """Seconds that a collective of several hosts takes besides its bytes."""
    collective_byte_s: float
    """Seconds for a byte that a host gets from other hosts by a collective."""
    compile_s: float
    """Seconds to compile a re-shard, once for all runs."""
    least_bytes: int
    """Bytes below which values are sent directly: collectives and relays would only add waits for other
    hosts."""


CPU = Costs(
    message_s=300e-6,
    shared_byte_s=1 / 8e9,
    wire_byte_s=1 / 3e9,
    copy_byte_s=1 / 3e9,
    stage_byte_s=0.0,
    launch_s=200e-6,
    device_byte_s=1 / 7e9,
    collective_s=300e-6,
    collective_byte_s=1 / 0.5e9,
    compile_s=40e-3,
    least_bytes=64 << 10,
)
"""Costs on the development machine (2 cores). Collectives are Gloo's; the wire is a bare tcp socket's loopback,
about a network of 25 Gbit/s."""

ACCELERATOR = CPU._replace(
    stage_byte_s=1 / 12e9,
    device_byte_s=1 / 400e9,
    collective_s=50e-6,
    collective_byte_s=1 / 20e9,
    compile_s=200e-3,
)
"""Costs that are not measured: PCIe 4 with 16 lanes at half its rate, a network of 200 Gbit/s between hosts,
and a quarter of an accelerator's memory bandwidth."""

SIMULATED = CPU._replace(
    wire_byte_s=1 / 1e6,
    stage_byte_s=1 / 8e6,
    collective_byte_s=1 / 2e6,
    compile_s=0.0,
    least_bytes=64,
)
"""Costs of simulated programs, slow so that they, whose arrays are small, go all ways."""

RUNS = 100
"""Number of runs of a program with computations, by which the cost of compiling a re-shard is divided."""
MOVES = 4
"""Number of runs of a program that only moves arrays, as those of `pw.put`."""
