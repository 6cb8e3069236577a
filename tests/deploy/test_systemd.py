"""`pw systemd` prints units that systemd takes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pw.cli.deploy import read
from pw.core.errors import Error
from pw.operating.deploy.daemons import named
from pw.operating.deploy.systemd import unit
from tests.deploy.engines import write_cluster

PARTS = {"controller": {"machine": "10.0.0.1"}, "islands": {"east": {"machines": ["10.0.0.2"]}}}


def test_a_worker_drains_and_is_started_again_after_errors_only(tmp_path: Path) -> None:
    file = read(write_cluster(tmp_path, **PARTS, python="/opt/pw/bin/python"))
    (worker,) = named(file, ["east-0"])
    lines = unit(file, worker).splitlines()
    (command,) = [line for line in lines if line.startswith("ExecStart=")]
    assert command.startswith(
        "ExecStart=/opt/pw/bin/python -m pw.cli.worker --controller tcp://10.0.0.1"
    )
    assert command.endswith("--credentials east-0.pem --drain 60")
    assert {"Restart=on-failure", "KillMode=mixed", "TimeoutStopSec=75"} <= set(lines)


def test_paths_are_absolute(tmp_path: Path) -> None:
    file = read(write_cluster(tmp_path, **PARTS, python="python3"))
    with pytest.raises(Error, match="as in python: /opt/pw/bin/python"):
        unit(file, named(file, ["controller"])[0])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    environment = {"PRICE": "5 $ and 10%"}
    file = read(write_cluster(tmp_path, **PARTS, python=sys.executable, environment=environment))
    for name in ("controller", "east-0"):
        path = tmp_path / f"pw-{name}.service"
        path.write_text(unit(file, named(file, [name])[0]))
        command = ["systemd-analyze", "verify", "--man=no", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        about = [line for line in done.stderr.splitlines() if path.name in line]
        assert not about, done.stderr
