"""An island of several hosts whose devices are of a JAX plugin, as GPUs are, on machines without any.

The plugin has JAX's CPU devices, opens them as JAX opens those of a plugin, and is an accelerator to `pw`:
the hosts compile by themselves, keep no executable of a gang, and name a network interface, not an address.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pw.devices.jax.group import interface_of
from tests.devices.test_platforms import run
from tests.stages.programs import ROOT

PLUGIN = """
import os

import jax
from jax._src import distributed, xla_bridge
from jaxlib import _jax, xla_client

from pw.core.platforms import PLATFORMS, Platform

PLUGGED = Platform(
    memories=PLATFORMS["cpu"].memories,
    jax="plugged",
    interface="PLUGGED_INTERFACE",
    settings=lambda devices: {"jax_num_cpu_devices": devices},
)
PLATFORMS["cpu"] = PLUGGED  # the devices call themselves so


def client():
    state = distributed.global_state
    interface = os.environ["PLUGGED_INTERFACE"]
    with open(os.environ["PLUGGED_OPENED"], "a") as file:
        print(state.process_id, state.num_processes, interface, os.getpid(), file=file)
    return xla_client.make_cpu_client(
        distributed_client=state.client,
        node_id=state.process_id,
        num_nodes=state.num_processes,
        num_devices=jax.config.jax_num_cpu_devices,
        collectives=_jax.make_gloo_tcp_collectives(
            distributed_client=state.client, interface=interface.removeprefix("=")
        ),
    )


def initialize():
    xla_bridge.register_backend_factory("plugged", client, priority=500, fail_quietly=False)
"""

ENTRY_POINTS = """
[jax_plugins]
plugged = pw_plugged
[pw.platforms]
plugged = pw_plugged:PLUGGED
"""

COMPUTES = """
import os, signal
import numpy as np, pw
from jax.sharding import PartitionSpec as P

with pw.LocalCluster(platform="plugged", hosts_per_island=2, devices_per_host=2) as cluster:
    devices = pw.make_virtual_device_set().add_slice(devices=4)
    mesh = pw.Mesh(devices.devices, ("x",))
    add = pw.jit(lambda v: v.sum() + v, mesh=mesh, in_shardings=P("x"), out_shardings=P("x"))
    y = add(np.arange(4.0))
    print(y)
    os.kill(cluster.hosts[1].runtime_pid(), signal.SIGKILL)
    print(add(y))
    print({pw.stats()[host]["compilations"] for host in ("island-0-host-0", "island-0-host-1")})
"""


@pytest.mark.processes
def test_hosts_with_a_plugin_form_a_group_and_again_without_the_one_that_died(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "pw_plugged-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: pw-plugged\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "pw_plugged.py").write_text(PLUGIN)
    opened = tmp_path / "opened"
    program = run(tmp_path, ["-c", COMPUTES], f"{tmp_path}:{ROOT}", PLUGGED_OPENED=str(opened))
    assert program.out == "[6. 7. 8. 9.]\n[36. 37. 38. 39.]\n{1}\n", program.err
    lines = [line.split() for line in opened.read_text().splitlines()]
    assert [line[:3] for line in sorted(lines)] == [["0", "2", "=lo"]] * 2 + [["1", "2", "=lo"]] * 2
    assert len({process for *_, process in lines}) == 4, "each group has processes of its own"


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    for other in ("192.0.2.200", "::1", "no-such-name"):
        assert interface_of(other) is None
