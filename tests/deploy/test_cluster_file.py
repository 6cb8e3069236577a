"""A cluster file becomes command lines; what is wrong in one is said with what to write instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pw.cli.deploy import read
from pw.core.errors import Error
from pw.deploy.daemons import address_of, daemons

FILE = """
name: lab
python: /opt/pw/bin/python
controller:
  machine: ann@10.0.0.1
  options: {policy: share}
islands:
  east:
    machines: [10.0.0.2, {ssh: gpu3, address: 10.0.0.3}, 10.0.0.4]
    spares: 1
    devices: 4
    platform: cuda
    ports: 7000-7100
    options: {device-memory: 4GiB, allow-python: true}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


def test_each_daemon_has_its_command_line(tmp_path: Path) -> None:
    file = read(written(tmp_path, FILE))
    assert address_of(file) == "tcp://10.0.0.1:7777"
    controller, first, second, spare = daemons(file)
    assert controller.machine.ssh == "ann@10.0.0.1"
    assert " ".join(controller.command) == (
        "/opt/pw/bin/python -m pw.cli.controller --bind tcp://10.0.0.1:7777 --islands 1 "
        "--credentials controller.pem --policy share"
    )
    assert " ".join(first.command) == (
        "/opt/pw/bin/python -m pw.cli.worker --controller tcp://10.0.0.1:7777 --island east --island-hosts 2 "
        "--devices 4 --platform cuda --name east-0 --bind tcp://10.0.0.2:7000-7100 --credentials east-0.pem "
        "--device-memory 4GiB --allow-python"
    )
    assert second.machine.ssh == "gpu3"
    assert "tcp://10.0.0.3:7000-7100" in second.command
    assert [one.name for one in (first, second, spare) if "--spare" in one.command] == ["east-2"]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("name: lab", "name: Lab 1", "'Lab 1' is no name: use up to 40 small letters"),
        ("name: lab", "nme: lab", "unknown field `nme`"),
        (
            "devices: 4",
            "devices: four",
            r"Expected `int`, got `str` - at `\$.islands\[...\].devices`",
        ),
        ("spares: 1", "spares: 3", "island east needs at least one host"),
        ("spares: 1", "hosts: 4", "has 4 workers and 3 machines; name a machine for each"),
        ("platform: cuda", "platform: rocm", "no platform 'rocm'; there are cpu, cuda, tpu"),
        ("ports: 7000-7100", "ports: many", "neither a port nor a range as in 7000-7100"),
        (
            "policy: share",
            "polcy: share",
            "controller: there is no option polcy; there are .*policy",
        ),
        ("device-memory: 4GiB", "name: x", "the option name is set by pw"),
        (
            "machine: ann@10.0.0.1",
            "machine: localhost",
            "localhost is reached by its own machine only",
        ),
        (
            "machine: ann@10.0.0.1",
            "port: 1",
            r"the controller has no machine; add to the file: controller:",
        ),
        ("name: lab", "environment: {PW_ADDRESS: x}", "PW_ADDRESS is set by pw"),
        ("islands:", "islands: [", "cluster.yaml: "),
    ],
)
def test_an_error_says_what_to_write(tmp_path: Path, before: str, after: str, words: str) -> None:
    assert before in FILE
    with pytest.raises(Error, match=words):
        daemons(read(written(tmp_path, FILE.replace(before, after))))


def test_a_missing_file_names_the_page(tmp_path: Path) -> None:
    with pytest.raises(Error, match=re.escape("docs/deploy.md shows a cluster file")):
        read(tmp_path / "cluster.yaml")
