"""`pw.on_ray` with a real Ray cluster on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.engines import TRAIN, environment

pytestmark = [pytest.mark.processes, pytest.mark.long]

SCRIPT = """
import os, signal, sys, time
import ray
from tests.stages.daemons import until
ray.init(num_cpus=4, include_dashboard=False, _temp_dir=sys.argv.pop(1), object_store_memory=80 << 20,
         log_to_driver=False)
import pw
begun_s = time.monotonic()
with pw.on_ray(islands=2, hosts_per_island=2) as cluster:
    print(f"{cluster} after {time.monotonic() - begun_s:.1f} s", flush=True)
    print("left of 4 CPUs:", ray.available_resources().get("CPU", 0), flush=True)
    groups = ray.util.placement_group_table().values()
    print("groups:", sorted((g["name"], g["state"], len(g["bundles"])) for g in groups), flush=True)
    exec(compile(TRAIN, "train", "exec"))
    status = pw.connect().ask.status(10.0)
    first = status.islands[0].hosts[0]
    print("host", first.name, "in", status.islands[0].name, flush=True)
    os.kill(first.pid, signal.SIGKILL)
    exec(compile(TRAIN, "train", "exec"))
until(lambda: ray.available_resources().get("CPU", 0) == 4, "the CPUs are given back")
print("given back:", ray.available_resources().get("CPU", 0), flush=True)
try:
    from pw.operating.deploy import on_ray
    on_ray.PLACE_S = 3.0
    pw.on_ray(islands=1, hosts_per_island=9)
except pw.Error as error:
    print("refused:", error, flush=True)
ray.shutdown()
"""


def test_a_script_trains_in_a_ray_cluster(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray: pip install ray")
    temporary = f"/tmp/pw-ray-{os.getpid()}"  # Ray's unix sockets want a short path
    with (tmp_path / "out").open("w+") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", f"TRAIN = {TRAIN!r}\n{SCRIPT}", temporary],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | environment(),
            start_new_session=True,
        )
        try:
            code = process.wait(115)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            code = process.wait()
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    said = (tmp_path / "out").read_text()
    assert code == 0, said
    print(said)
    assert said.count("trained: loss") == 2
    assert "left of 4 CPUs: 0" in said
    assert "groups: [('pw-ray-0', 'CREATED', 2), ('pw-ray-1', 'CREATED', 2)]" in said
    assert "given back: 4.0" in said
    assert "refused: Ray has had no room for 1 of 1 islands for 3 s" in said
