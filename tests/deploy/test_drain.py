"""`pw-worker --drain`: a worker that gets SIGTERM moves its data to a spare first, and then ends."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pw
from tests.stages.daemons import Program, send, start_module

pytestmark = [pytest.mark.processes, pytest.mark.long]


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    pw.disconnect()
    for one in reversed(started):
        one.kill()


def test_a_worker_that_is_told_to_end_moves_its_data_first(
    tmp_path: Path, programs: list[Program]
) -> None:
    controller = start_module("pw.cli.controller", "--bind", "tcp://127.0.0.1:0", folder=tmp_path)
    programs.append(controller)
    controller.until_says("listens at")
    address = re.findall(r"listens at (\S+)", controller.out)[0]

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
    send(spare.process.pid, signal.SIGTERM)  # no host can take what it has
    assert spare.end() == 0
    assert "no spare host can take its place" in spare.err
