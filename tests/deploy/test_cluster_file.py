"""A cluster file becomes command lines; what is wrong in one is said with what to write instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pw.cli.deploy import read
from pw.core.errors import Error
from pw.operating.deploy.daemons import address_of, daemons

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
        ("name: lab", "nme: lab", "line 2: the file has no key nme; did you mean name"),
        (
            "devices: 4",
            "devices: four",
            "line 11: islands.east.devices needs a whole number, not 'four'",
        ),
        (
            "devices: 4",
            "devics: 4",
            "line 11: islands.east has no key devics; did you mean devices",
        ),
        ("address: 10", "adress: 10", r"line 9: islands.east.machines\[1\] has no key adress; did"),
        ("  east:", "  east: 4\n  west:", "line 8: islands.east needs keys with values, not 4"),
        (
            "10.0.0.4]",
            "[1]]",
            r"line 9: islands.east.machines\[2\] needs text or keys .*, not \[1\]",
        ),
        ("name: lab", "- lab", "line 3: .*: this is no YAML"),
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
        ("name: lab", 'environment: {"A;date": x}', "'A;date' is no name of a variable"),
        ("name: lab", 'environment: {"A B": x}', "'A B' is no name of a variable"),
        ("islands:", "islands: [", r"cluster\.yaml: line 9: .*: this is no YAML"),
        (FILE, "", "a cluster needs an island"),
        (FILE, "- lab", "line 1: the file needs keys with values"),
    ],
)
def test_an_error_says_what_to_write(tmp_path: Path, before: str, after: str, words: str) -> None:
    assert before in FILE
    with pytest.raises(Error, match=words):
        daemons(read(written(tmp_path, FILE.replace(before, after))))


def test_a_missing_file_names_the_page(tmp_path: Path) -> None:
    with pytest.raises(Error, match=re.escape("docs/deploy.md shows a cluster file")):
        read(tmp_path / "cluster.yaml")
