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
    """A transfer between two hosts, without its bytes: posted, granted and pushed."""
    shared_byte_s: float
    """A byte between two processes of one machine."""
    wire_byte_s: float
    """A byte between two machines."""
    copy_byte_s: float
    """A byte that a host puts into its place in a new shard; a piece that is the whole shard is not copied."""
    stage_byte_s: float
    """A byte between the memory of a device and that of its host, either way."""
    launch_s: float
    """A computation: launched and enqueued."""
    device_byte_s: float
    """A byte of a result that XLA writes on devices of one host."""
    collective_s: float
    """A collective of several hosts, without its bytes."""
    collective_byte_s: float
    """A byte that a host gets from other hosts by a collective."""
    compile_s: float
    """To compile a re-shard, once for all runs."""
    least_bytes: int
    """Smaller values are sent directly: collectives and relays would only add waits for other hosts."""


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
"""Readings on the development machine (2 cores). Collectives are Gloo's; the wire is a bare tcp socket's
loopback, about a network of 25 Gbit/s."""

ACCELERATOR = CPU._replace(
    stage_byte_s=1 / 12e9,
    device_byte_s=1 / 400e9,
    collective_s=50e-6,
    collective_byte_s=1 / 20e9,
    compile_s=200e-3,
)
"""Not measured: PCIe 4 with 16 lanes at half its rate, a network of 200 Gbit/s between hosts, and a quarter
of an accelerator's memory bandwidth."""

SIMULATED = CPU._replace(
    wire_byte_s=1 / 1e6,
    stage_byte_s=1 / 8e6,
    collective_byte_s=1 / 2e6,
    compile_s=0.0,
    least_bytes=64,
)
"""Slow, so that simulated programs, whose arrays are small, go all ways."""

RUNS = 100
"""How often a program with computations is run, to divide what it costs to compile a re-shard."""
MOVES = 4
"""How often a program is run that only moves arrays, as those of `pw.put`."""
