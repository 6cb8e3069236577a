"""`pw-worker --drain`: a worker that gets SIGTERM moves its data first, and then ends.

Where no other host can take the work, its clients leave the worker, and go on with the next one of its name.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from tests.stages.daemons import Program, send, start_module
from tests.stages.samples import long

pytestmark = pytest.mark.processes


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    pw.disconnect()
    for one in reversed(started):
        one.kill()


def started(tmp_path: Path, programs: list[Program]) -> str:
    """Start a controller; return its address."""
    controller = start_module("pw.cli.controller", "--bind", "tcp://127.0.0.1:0", folder=tmp_path)
    programs.append(controller)
    controller.until_says("listens at")
    (address,) = re.findall(r"listens at (\S+)", controller.out)
    return str(address)


@pytest.mark.long
def test_a_worker_that_is_told_to_end_moves_its_data_first(
    tmp_path: Path, programs: list[Program]
) -> None:
    address = started(tmp_path, programs)

    def worker(name: str, *more: object) -> Program:
        common = ("--controller", address, "--island", "i", "--name", name, "--drain", 30)
        programs.append(start_module("pw.cli.worker", *common, *more, folder=tmp_path))
        return programs[-1]

    first, spare = worker("first"), worker("second", "--spare")
    first.until_says("joined")
    pw.connect(address)
    mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=1).devices, ("x",))
    x = pw.jit(lambda x: x + 1, mesh=mesh)(np.arange(5, dtype=np.float32))
    x.block_until_ready()
    send(first.process.pid, signal.SIGTERM)
    assert first.end() == 0
    assert "drains first" in first.err
    assert "it was drained" in first.err
    assert np.asarray(x).tolist() == [1, 2, 3, 4, 5]
    send(spare.process.pid, signal.SIGTERM)
    assert spare.end() == 0
    assert "no host took all it has" in spare.err


@pytest.mark.parametrize("hosts", [1, long(2)])
def test_clients_leave_workers_that_must_end_and_go_on_with_the_next(
    tmp_path: Path, programs: list[Program], hosts: int
) -> None:
    """All workers of a cluster get a notice, as when a whole group of spot machines is taken away."""
    address = started(tmp_path, programs)
    left = tmp_path / "left"

    def workers() -> list[Program]:
        common = ("--controller", address, "--island", "i", "--island-hosts", hosts)
        common += ("--drain", 60, "--keep-files", left)
        new = [
            start_module("pw.cli.worker", *common, "--name", f"i/{at}", folder=tmp_path)
            for at in range(hosts)
        ]
        programs.extend(new)
        return new

    first = workers()
    pw.connect(address)
    mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=hosts).devices, ("x",))
    step = pw.jit(lambda x: x * 3 + 1, mesh=mesh, donate_argnums=0, out_shardings=P("x"))
    numbers = np.arange(8, dtype=np.uint32)
    kept = pw.put(numbers, sharding=pw.NamedSharding(mesh, P("x")))
    state = pw.put(numbers, sharding=pw.NamedSharding(mesh, P("x")))
    for _ in range(50):
        state = step(state)
    state.block_until_ready()
    notices = [host.notice for host in pw.status().hosts]
    assert [notice.grace_s for notice in notices if notice is not None] == [60] * hosts
    assert sum(notice.size_bytes for notice in notices if notice is not None) >= 64
    assert "of 60 s" in str(pw.status())
    for worker in first:
        send(worker.process.pid, signal.SIGTERM)
    for _ in range(50):  # these calls may wait for the next workers
        state = step(state)
    assert [worker.end() for worker in first] == [0] * hosts
    assert sum("left for the next worker" in worker.err for worker in first) >= 1
    workers()
    expected = numbers
    for _ in range(100):
        expected = expected * 3 + 1
    np.testing.assert_array_equal(np.asarray(state), expected)
    np.testing.assert_array_equal(np.asarray(kept), numbers)
