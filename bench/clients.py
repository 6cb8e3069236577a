"""Client processes of a running cluster, which do what a benchmark asks for.

python -m bench.clients move ADDRESS BYTES              moves an array from island-0 to island-1
python -m bench.clients compute ADDRESS STEPS...        calls functions of so many steps
python -m bench.clients crowd ADDRESS CLIENTS STEPS...  the same in as many processes as asked for
python -m bench.clients tenant ADDRESS SHARE PRIORITY FILE STEPS...  the same for some time
python -m bench.clients own ADDRESS                     blocking calls on a device of island-1
python -m bench.clients beside ADDRESS MS               calls of MS on another device of island-1
python -m bench.clients flood ADDRESS MS                calls of MS, as many in flight as possible
python -m bench.clients gang ADDRESS DEVICES STEPS...   calls with an all-reduce over all devices
python -m bench.clients alone STEPS...                  the same as `compute`, in plain JAX
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pw
from bench.baselines.peer import Peer, serve
from bench.baselines.steps import AXIS, busy, busy_together, calls, local, together
from bench.measure import seconds
from bench.placement import new_mesh, put
from pw.devices.jax import group

AHEAD = 512
"""The calls that pw lets a client have in flight: the next call waits until one has ended."""

# Not a number: on CPU, JAX runs a computation of few operations in the calling thread.
_MATRIX = np.ones((64, 64), np.float32)

Cases = Mapping[str, Callable[[int], object]]


def started(stack: ExitStack, processes: list[list[str]]) -> list[Peer]:
    """Client processes with these arguments; two start at a time, since each compiles."""

    def start(arguments: list[str]) -> Peer:
        return Peer("a client", "bench.clients", [arguments])

    with ThreadPoolExecutor(2) as starters:
        return [stack.enter_context(peer) for peer in starters.map(start, processes)]


def move(address: str, size_bytes: str) -> Cases:
    """Move one array after the other; each move begins when the one before has ended.

    A computed array is in private memory of its host and must be copied. An array that was put is
    in shared memory, which other processes map.
    """
    pw.connect(address)
    here, there = new_mesh(island="island-0"), new_mesh(island="island-1")
    stored = put(jnp.ones(int(size_bytes), jnp.uint8), here)
    computed = pw.jit(lambda x: x * 2, mesh=here)(stored)
    target = pw.NamedSharding(there, pw.PartitionSpec())

    def moves(array: Any) -> Callable[[int], object]:
        def case(count: int) -> None:
            for _ in range(count):
                pw.put(array, sharding=target).block_until_ready()

        return case

    take = pw.jit(lambda x: x[-1], mesh=there)
    program = pw.program(lambda x: take(x))

    def edges(count: int) -> None:
        for _ in range(count):
            program(computed).block_until_ready()

    return {"move computed": moves(computed), "move again": moves(stored), "edge": edges}


def compute(address: str, *steps: str) -> Cases:
    """Calls on the first device, for each number of steps."""
    pw.connect(address)
    mesh = new_mesh()
    start = put(np.float32(0), mesh)
    return {number: calls(pw.jit(busy(int(number)), mesh=mesh), start) for number in steps}


def crowd(address: str, clients: str, *steps: str) -> Cases:
    """`compute` in many processes, forked from this one: a case for each number of them and of steps.

    A count is of calls of all of them, who share it equally.
    """
    processes = multiprocessing.get_context("fork")  # one import of JAX, which has no backend yet
    pipes = []
    for _ in range(int(clients)):
        here, there = processes.Pipe()
        processes.Process(target=_member, args=(there, address, steps), daemon=True).start()
        pipes.append(here)

    def case(size: int, number: str) -> Callable[[int], object]:
        def work(count: int) -> None:
            for pipe in pipes[:size]:
                pipe.send((number, -(-count // size)))
            for pipe in pipes[:size]:
                if error := pipe.recv():
                    raise RuntimeError(error)

        return work

    return {
        f"{size} {number}": case(size, number) for size in sizes_to(len(pipes)) for number in steps
    }


def sizes_to(most: int) -> list[int]:
    """1, 4, 16, ... and `most`."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(4 * sizes[-1], most))
    return sizes


def _member(pipe: Any, address: str, steps: Sequence[str]) -> None:
    """Do what the process asks for that started this one; the answer is an error text, or empty."""
    try:
        cases = compute(address, *steps)
        while True:
            number, count = pipe.recv()
            cases[number](count)
            pipe.send("")
    except EOFError:
        """The other process has ended."""
    except Exception as error:  # noqa: BLE001 - the other process reports it
        pipe.send(f"{type(error).__name__}: {error}")


def tenant(address: str, weight: str, priority: str, file: str, *steps: str) -> Cases:
    """For each number of steps: 1 or 200 calls in flight, or as many as possible (`enqueue`).

    A count is tenths of a second. FILE gets the times at which calls ended, as this client sees
    them. A case cancels its calls in flight at its end.
    """
    pw.connect(address, share=float(weight), priority=int(priority))
    mesh = new_mesh()
    start = put(np.float32(0), mesh)

    def case(function: Callable[[Any], Any], waits: int) -> Callable[[int], object]:
        def work(tenths: int) -> None:
            flying: deque[Any] = deque()
            ends_s: list[float] = []
            end_s = time.monotonic() + tenths * 0.1
            while not ends_s or ends_s[-1] < end_s:
                flying.append(function(start))
                if len(flying) > (waits or AHEAD) - 1:
                    oldest = flying.popleft()
                    if waits:
                        oldest.block_until_ready()
                    ends_s.append(time.monotonic())
            np.save(file, np.array(ends_s))
            pw.cancel(list(flying))
            for array in flying:
                with contextlib.suppress(pw.Error):
                    array.block_until_ready()

        return work

    cases: dict[str, Callable[[int], object]] = {}
    for number in steps:
        function = pw.jit(busy(int(number)), mesh=mesh)
        for kind, waits in (("wait-1", 1), ("wait-200", 200), ("enqueue", 0)):
            cases[f"{kind} {number}"] = case(function, waits)
    return cases


def busy_steps(ms: float, start: Any = _MATRIX) -> int:
    """The number of steps that take `ms` on a matrix, or a number, in plain JAX on this machine."""
    few, many = (1_000, 11_000) if np.ndim(start) else (100_000, 1_100_000)
    took_s = {}
    for steps in (few, many):
        function = jax.jit(busy(steps))
        function(start).block_until_ready()
        call = partial(lambda compiled: compiled(start).block_until_ready(), function)
        took_s[steps] = min(seconds(call) for _ in range(3))
    return max(1, round(ms * 1e-3 * (many - few) / (took_s[many] - took_s[few])))


def own(address: str) -> Cases:
    """One call after the other, on a device that no other client uses."""
    pw.connect(address)
    mesh = new_mesh(island="island-1")
    return {"calls": calls(pw.jit(local, mesh=mesh), put(_MATRIX, mesh), wait=True)}


def beside(address: str, ms: str) -> Cases:
    """Long calls on island-1; and short calls there, on results of long calls on island-0."""
    steps = busy_steps(float(ms))
    pw.connect(address)
    there, here = new_mesh(island="island-0"), new_mesh(island="island-1")
    make, use = pw.jit(busy(steps), mesh=there), pw.jit(local, mesh=here)
    stages = pw.program(lambda x: use(make(x)))
    long_calls = calls(pw.jit(busy(steps), mesh=here), put(_MATRIX, here))
    return {"long calls": long_calls, "stages": _independent(stages, put(_MATRIX, there))}


def flood(address: str, ms: str) -> Cases:
    """Long calls on island-0, independent of each other; `in line` in the thread that calls JAX."""
    pw.connect(address)
    mesh = new_mesh(island="island-0")

    def case(argument: Any) -> Callable[[int], object]:
        function = pw.jit(busy(busy_steps(float(ms), argument)), mesh=mesh)
        return _independent(function, put(argument, mesh))

    return {"long calls": case(_MATRIX), "calls in line": case(np.float32(1))}


def _independent(function: Callable[[Any], Any], argument: Any) -> Callable[[int], object]:
    """A case of calls that need no results of each other."""

    def case(count: int) -> None:
        for made in [function(argument) for _ in range(count)]:
            made.block_until_ready()

    return case


def gang(address: str, devices: str, *steps: str) -> Cases:
    """Calls on all devices of an island, for each number of steps."""
    pw.connect(address)
    mesh = new_mesh(int(devices), axis=AXIS)
    split = pw.NamedSharding(mesh, pw.PartitionSpec(AXIS))
    start = pw.put(np.zeros(int(devices), np.float32), sharding=split)

    def compiled(steps: int) -> Any:
        whole = together(busy_together(steps))
        return pw.jit(whole, mesh=mesh, in_shardings=split, out_shardings=split)

    return {number: calls(compiled(int(number)), start) for number in steps}


def alone(*steps: str) -> Cases:
    """Plain JAX on one device, set up like a worker."""
    group.prepare("cpu", 1)
    return {number: calls(jax.jit(busy(int(number))), np.float32(0)) for number in steps}


KINDS: dict[str, Callable[..., Cases]] = {
    kind.__name__: kind for kind in (move, compute, crowd, tenant, own, beside, flood, gang, alone)
}


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    serve(lambda: KINDS[kind](*arguments))
