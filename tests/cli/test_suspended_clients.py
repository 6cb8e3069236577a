"""A client that was suspended, and a controller that is started again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.stages.daemons import Program, start_module, until
from tests.stages.scripts import finish, start_client

SCRIPT = """
mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2).devices, ("x",))
x = pw.put(np.arange(8.0), sharding=pw.NamedSharding(mesh, pw.PartitionSpec("x")))
step = pw.jit(lambda x: x + 1, mesh=mesh, donate_argnums=0)
x = pw.block_until_ready(step(x))
print("begun", flush=True)
sys.stdin.readline()
for _ in range(4):
    x = step(x)
assert np.array_equal(pw.get(x, timeout=120), np.arange(8.0) + 5)
print("went on")
"""


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_a_suspended_client_stays_so_under_another_controller(tmp_path: Path) -> None:
    started: list[Program] = []

    def start(module: str, *arguments: object) -> Program:
        started.append(start_module(module, *arguments, folder=tmp_path))
        return started[-1]

    def ask(*arguments: object) -> str:
        asked = start("pw.cli.main", *arguments, "--address", address)
        assert asked.end() == 0, asked.err
        return asked.out

    def clients() -> list[dict[str, Any]]:
        status: dict[str, Any] = json.loads(ask("status", "--json", "--timeout", 30))
        return list(status["clients"])

    try:
        controller = start("pw.cli.controller", "--bind", "tcp://127.0.0.1:0")
        controller.until_says("listens at")
        address = re.findall(r"listens at (\S+)", controller.out)[0]
        start("pw.cli.worker", "--controller", address, "--island", "i", "--devices", 2)
        script = start_client(address, SCRIPT)
        assert script.stdout.readline() == "begun\n"
        (client,) = [one["client"] for one in clients()]
        ask("suspend", client)
        controller.kill()
        start("pw.cli.controller", "--bind", address).until_says("listens at")
        until(lambda: [one["client"] for one in clients()] == [client], "the client is back")
        script.stdin.write("\n")
        script.stdin.flush()
        assert "suspended, by" in clients()[0]["suspended"]
        ask("resume", client)
        assert finish(script) == "went on\n"
    finally:
        for one in reversed(started):
            one.kill()
