"""Client processes of a cluster that runs already, each told by a benchmark what to do when.

python -m bench.clients move ADDRESS BYTES              moves an array from island-0 to island-1
python -m bench.clients compute ADDRESS STEPS...        calls functions that take so many steps each
python -m bench.clients share ADDRESS SHARE STEPS FILE  the same with a weight; notes when each call ended
python -m bench.clients tenant ADDRESS SHARE PRIORITY FILE STEPS...  the same for some time, waiting or not
python -m bench.clients own ADDRESS                     blocking calls on a device of island-1
python -m bench.clients beside ADDRESS MS               calls that take so long on another device there
python -m bench.clients flood ADDRESS MS                calls that take so long, as many in flight as can be
python -m bench.clients gang ADDRESS DEVICES STEPS...   calls functions over all devices, with an all-reduce
python -m bench.clients alone STEPS...                  what `compute` does, in plain JAX
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pw
from bench.baselines import steps as computations
from bench.baselines.peer import Peer, serve
from bench.measure import seconds
from pw.devices.jax import group

AHEAD = 512
"""Calls that pw lets a client have in flight: the next one returns when one of them has ended."""

_MATRIX = np.ones((64, 64), np.float32)

Cases = Mapping[str, Callable[[int], object]]


def per_second(peer: Peer, case: str, count: int) -> float:
    """How often a second a contender does `case`."""
    return count / peer.seconds(case, count)


def busy(steps: int) -> Callable[[Any], Any]:
    """A function of an array that keeps a core busy for so many steps, some 20 ns each."""

    def work(x: Any) -> Any:
        return jax.lax.fori_loop(0, steps, lambda _, value: value * 0.999999 + 1e-6, x)

    return work


def busy_together(steps: int) -> Callable[[Any], Any]:
    """The same on each device's element, and then the mean of all, plus one."""
    return lambda x: computations.all_reduce(busy(steps)(x))


def calls(function: Callable[[Any], Any], start: Any) -> Callable[[int], object]:
    """`x = f(x)`, as many calls in flight as the system allows.

    Only the last value is waited for: each wait is a round trip.
    """

    def case(count: int) -> None:
        value = start
        for _ in range(count):
            value = function(value)
        value.block_until_ready()

    return case


def move(address: str, size_bytes: str) -> Cases:
    """One array after the other; the next is asked for as soon as the last is there.

    What a computation has made is in the memory of its host only, and must be copied. What was put
    there lies in pages that other processes can read too.
    """
    pw.connect(address)
    meshes = [
        pw.Mesh(pw.make_virtual_device_set().add_slice(devices=1, island=island).devices, ("data",))
        for island in ("island-0", "island-1")
    ]
    here, there = (pw.NamedSharding(mesh, pw.PartitionSpec()) for mesh in meshes)
    ones = jnp.ones(int(size_bytes), jnp.uint8)
    put = pw.put(np.asarray(ones), sharding=here)
    computed = pw.jit(lambda x: x * 2, mesh=meshes[0])(put)

    def moves(array: Any) -> Callable[[int], object]:
        def case(count: int) -> None:
            for _ in range(count):
                pw.put(array, sharding=there).block_until_ready()

        return case

    return {"move computed": moves(computed), "move again": moves(put)}


def compute(address: str, *steps: str) -> Cases:
    """Calls on the first device, for each number of steps."""
    pw.connect(address)
    mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=1).devices, ("data",))
    start = pw.put(np.float32(0), sharding=pw.NamedSharding(mesh, pw.PartitionSpec()))
    return {number: calls(pw.jit(busy(int(number)), mesh=mesh), start) for number in steps}


def share(address: str, weight: str, steps: str, file: str) -> Cases:
    """Calls of one function; FILE gets the moments at which they ended, as this client sees it."""
    pw.connect(address, share=float(weight))
    mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=1).devices, ("data",))
    function = pw.jit(busy(int(steps)), mesh=mesh)
    start = pw.put(np.float32(0), sharding=pw.NamedSharding(mesh, pw.PartitionSpec()))

    def case(count: int) -> None:
        value, ends_s = start, []
        for number in range(count + AHEAD):
            value = function(value)
            if number >= AHEAD:
                ends_s.append(time.monotonic())
        value.block_until_ready()
        np.save(file, np.array(ends_s))

    return {"calls": case}


def tenant(address: str, weight: str, priority: str, file: str, *steps: str) -> Cases:
    """For each number of steps: wait for the oldest of 1 or 200 calls before the next one, or only enqueue.

    A case goes on for as many tenths of a second as it is told; FILE gets the moments at which calls ended, as
    this client sees it. What is queued then is cancelled.
    """
    pw.connect(address, share=float(weight), priority=int(priority))
    mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=1).devices, ("data",))
    start = pw.put(np.float32(0), sharding=pw.NamedSharding(mesh, pw.PartitionSpec()))

    def case(function: Callable[[Any], Any], waits: int) -> Callable[[int], object]:
        def work(tenths: int) -> None:
            in_flight: deque[Any] = deque()
            ends_s: list[float] = []
            end_s = time.monotonic() + tenths * 0.1
            while not ends_s or ends_s[-1] < end_s:
                in_flight.append(function(start))
                if len(in_flight) > (waits or AHEAD) - 1:
                    oldest = in_flight.popleft()
                    if waits:
                        oldest.block_until_ready()
                    ends_s.append(time.monotonic())
            np.save(file, np.array(ends_s))
            pw.cancel(list(in_flight))
            for array in in_flight:
                with contextlib.suppress(pw.Error):
                    array.block_until_ready()

        return work

    cases: dict[str, Callable[[int], object]] = {}
    for number in steps:
        function = pw.jit(busy(int(number)), mesh=mesh)
        cases |= {
            f"{kind} {number}": case(function, waits)
            for kind, waits in (("wait-1", 1), ("wait-200", 200), ("enqueue", 0))
        }
    return cases


def _one_of(island: str) -> tuple[pw.Mesh, Any]:
    """A device of an island, and a matrix there.

    (Not a number: on CPU, JAX runs what has few operations in the thread that calls it, loops and all.)
    """
    mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=1, island=island).devices, ("x",))
    return mesh, pw.put(_MATRIX, sharding=pw.NamedSharding(mesh, pw.PartitionSpec()))


def _steps(ms: float, start: Any = _MATRIX) -> int:
    """How many steps take so long on a matrix, or a number, here, in plain JAX."""
    few, many = (1_000, 11_000) if np.ndim(start) else (100_000, 1_100_000)
    took_s = {}
    for steps in (few, many):
        function = jax.jit(busy(steps))
        function(start).block_until_ready()
        call = partial(lambda compiled: compiled(start).block_until_ready(), function)
        took_s[steps] = min(seconds(call) for _ in range(3))
    return max(1, round(ms * 1e-3 * (many - few) / (took_s[many] - took_s[few])))


def own(address: str) -> Cases:
    """One call after the other, on a device of one's own."""
    pw.connect(address)
    mesh, start = _one_of("island-1")
    function = pw.jit(lambda x: x + 1, mesh=mesh)

    def case(count: int) -> None:
        for _ in range(count):
            function(start).block_until_ready()

    return {"calls": case}


def beside(address: str, ms: str) -> Cases:
    """Long calls on a device of island-1; and short ones there, on what long calls on island-0 have made."""
    steps = _steps(float(ms))
    pw.connect(address)
    (there, first), (here, start) = map(_one_of, ("island-0", "island-1"))
    make, use = pw.jit(busy(steps), mesh=there), pw.jit(lambda x: x + 1, mesh=here)
    stages = pw.program(lambda x: use(make(x)))

    def staged(count: int) -> None:
        for made in [stages(first) for _ in range(count)]:
            made.block_until_ready()

    return {"long calls": calls(pw.jit(busy(steps), mesh=here), start), "stages": staged}


def flood(address: str, ms: str) -> Cases:
    """Long calls that need nothing of each other, on the first device; one that JAX runs in its caller, too."""
    pw.connect(address)
    mesh, start = _one_of("island-0")
    number = pw.put(np.float32(1), sharding=pw.NamedSharding(mesh, pw.PartitionSpec()))

    def case(argument: Any, local: Any) -> Callable[[int], object]:
        function = pw.jit(busy(_steps(float(ms), local)), mesh=mesh)

        def calls(count: int) -> None:
            for made in [function(argument) for _ in range(count)]:
                made.block_until_ready()

        return calls

    return {"long calls": case(start, _MATRIX), "calls in line": case(number, np.float32(1))}


def gang(address: str, devices: str, *steps: str) -> Cases:
    """Calls on all devices of an island, for each number of steps."""
    pw.connect(address)
    count = int(devices)
    mesh = pw.Mesh(
        pw.make_virtual_device_set().add_slice(devices=count).devices, (computations.AXIS,)
    )
    spec = pw.PartitionSpec(computations.AXIS)
    start = pw.put(np.zeros(count, np.float32), sharding=pw.NamedSharding(mesh, spec))

    def compiled(number: int) -> Callable[[Any], Any]:
        whole = computations.together(busy_together(number))
        function: Callable[[Any], Any] = pw.jit(
            whole, mesh=mesh, in_shardings=spec, out_shardings=spec
        )
        return function

    return {number: calls(compiled(int(number)), start) for number in steps}


def alone(*steps: str) -> Cases:
    """Plain JAX on one device, set up like a worker."""
    group.prepare("cpu", 1)
    return {number: calls(jax.jit(busy(int(number))), np.float32(0)) for number in steps}


KINDS: dict[str, Callable[..., Cases]] = {
    "move": move,
    "compute": compute,
    "share": share,
    "tenant": tenant,
    "own": own,
    "beside": beside,
    "flood": flood,
    "gang": gang,
    "alone": alone,
}


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    serve(lambda: KINDS[kind](*arguments))
