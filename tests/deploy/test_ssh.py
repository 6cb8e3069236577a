"""`pw up`, `pw down` and `pw logs` with a real sshd on the loopback."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.deploy.engines import SSHD, free_port, pw_command, sshd, train, write_cluster
from tests.stages.daemons import until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(SSHD is None, reason="needs sshd: apt-get install openssh-server"),
]

ISLANDS = {
    "east": {"machines": ["127.0.0.1"] * 2, "devices": 1},
    "west": {"machines": ["127.0.0.1"]},
}


class Lab(NamedTuple):
    """A cluster file whose machines are this one, over ssh."""

    file: Path
    options: list[str]

    @property
    def folder(self) -> Path:
        return self.file.parent

    def pid(self, name: str) -> int:
        return int((self.folder / "machine" / f"{name}.pid").read_text())


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with sshd(tmp_path) as options:
        controller = {"machine": "127.0.0.1", "port": free_port()}
        file = write_cluster(tmp_path, controller=controller, islands=ISLANDS, ssh=options)
        try:
            yield Lab(file, options)
        finally:
            write_cluster(tmp_path, controller=controller, islands=ISLANDS, ssh=options)
            done = pw_command("down", file)
            assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_a_cluster_comes_up_trains_and_goes_down(lab: Lab) -> None:
    done = pw_command("up", lab.file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "controller: new credentials on 127.0.0.1" in done.stdout
    assert "east-1: started on 127.0.0.1" in done.stdout
    client = lab.folder / "keys" / "client.pem"
    assert f"PW_CREDENTIALS={client} python script.py" in done.stdout
    print(done.stdout)
    said = train(client)
    assert "trained: loss" in said
    print(said)

    again = pw_command("up", lab.file)
    assert again.returncode == 0, again.stderr
    assert "controller: runs on 127.0.0.1" in again.stdout
    assert "started" not in again.stdout
    assert "credentials on" not in again.stdout

    os.kill(lab.pid("west-0"), signal.SIGKILL)
    third = pw_command("up", lab.file)
    assert third.returncode == 0, third.stderr
    assert "west-0: started" in third.stdout
    assert "east-0: runs" in third.stdout

    logs = pw_command("logs", "controller", "--file", lab.file)
    assert "controller: " in logs.stdout
    assert "listening" in pw_command("logs", "controller", "--file", lab.file, "-n", 200).stdout
    assert "has no 'north'; it has controller, east-0" in (
        pw_command("logs", "north", "--file", lab.file).stderr
    )

    checked = pw_command("doctor", lab.file)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "127.0.0.1: ok      clock: agrees" in checked.stdout
    assert "takes connections" in checked.stdout
    print(checked.stdout)

    down = pw_command("down", lab.file)
    assert down.returncode == 0, down.stderr
    assert "controller: ended" in down.stdout
    assert "controller: stopped" in pw_command("down", lab.file).stdout


@pytest.mark.long
def test_a_machine_that_is_gone_is_said(lab: Lab) -> None:
    islands = ISLANDS | {"west": {"machines": [{"ssh": "127.0.0.2", "address": "127.0.0.1"}]}}
    port = free_port()
    controller = {"machine": "127.0.0.1", "port": port}
    write_cluster(lab.folder, controller=controller, islands=islands, ssh=lab.options)
    done = pw_command("up", lab.file, "--timeout", 0)
    assert done.returncode == 1
    assert "east-0: started" in done.stdout
    assert "127.0.0.2 is not reached (" in done.stderr
    assert "this must work without a question: ssh " in done.stderr
    pids = [lab.pid("east-0"), lab.pid("controller")]
    down = pw_command("down", lab.file)
    assert down.returncode == 1
    assert "127.0.0.2 is not reached" in down.stderr
    until(lambda: not any(map(runs, pids)), "the daemons on the other machine have ended")


def runs(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return bool(Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:
        return False


@pytest.mark.long
def test_a_daemon_that_ends_at_once_shows_its_last_lines(lab: Lab) -> None:
    controller = {"machine": "127.0.0.1", "port": free_port(), "options": {"lease": 1}}
    write_cluster(lab.folder, controller=controller, islands=ISLANDS, ssh=lab.options)
    done = pw_command("up", lab.file)
    assert done.returncode == 1
    assert "controller ended; pw-controller: error:" in done.stderr
    assert "--lease" in done.stderr
