"""What tests of the public API share: slices on named islands, a host that is held up, counters."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import pw
from pw.devices.host.backend import RunFunction
from pw.testing import InProcessCluster
from tests.stages.daemons import BOUND_S, until


def mesh_on(island: int, devices: int = 2, axis: str = "x") -> pw.Mesh:
    """A one-axis mesh over a new slice of an island."""
    part = pw.make_virtual_device_set().add_slice(devices=devices, island=f"island-{island}")
    return pw.Mesh(part.devices, (axis,))


def split(mesh: pw.Mesh) -> pw.NamedSharding:
    """The first dimension over the mesh's axis."""
    return pw.NamedSharding(mesh, pw.PartitionSpec(mesh.axis_names[0]))


@contextlib.contextmanager
def held(cluster: InProcessCluster, host: int = 0) -> Iterator[None]:
    """Inside the block, the host enqueues nothing: what is launched there stays undone."""
    reached, gate = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        gate.wait(BOUND_S)

    cluster.hosts[host].backend.submit([RunFunction(wait)])
    assert reached.wait(BOUND_S)
    try:
        yield
    finally:
        gate.set()


def live() -> dict[str, int]:
    """Arrays that the controller and every host hold."""
    gc.collect()
    return {
        node: counters["live_arrays"]
        for node, counters in pw.stats().items()
        if "live_arrays" in counters
    }


def until_live(expected: dict[str, int]) -> None:
    """Wait until no more than so many arrays are held everywhere."""

    def few() -> bool:
        held_now = live()
        return all(held_now[node] <= count for node, count in expected.items())

    until(few, f"live arrays {expected}")


def numbers(size: int, start: int = 0) -> Any:
    """`size` float32 numbers that float32 holds exactly."""
    return np.arange(start, start + size, dtype=np.float32)


@contextlib.contextmanager
def interrupted_in_its_wait() -> Iterator[None]:
    """Expect the Ctrl-C that comes, as from a terminal, as soon as the main thread waits in the block."""
    main = threading.main_thread().ident
    assert main is not None
    over = threading.Event()

    def interrupt() -> None:
        while not over.wait(0.01):
            calls = traceback.extract_stack(sys._current_frames()[main])
            if any(call.filename.endswith("futures/_base.py") for call in calls):
                signal.pthread_kill(main, signal.SIGINT)
                return

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        over.set()
        thread.join()
