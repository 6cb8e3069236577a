"""`pw up`, `pw down` and `pw logs` with a real sshd on the loopback."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.deploy.engines import ROOT, SSHD, free_port, pw_command, sshd, train, write_cluster
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
@pytest.mark.timeout(
    400
)  # a dozen commands; pytest's bound is for all of them, and the end of the cluster
def test_a_cluster_comes_up_trains_and_goes_down(lab: Lab) -> None:
    before = pw_command("doctor", lab.file)
    assert before.returncode == 0, before.stdout + before.stderr
    assert "127.0.0.1: later   port: no process listens" in before.stdout
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
    assert "ok      access: " in checked.stdout
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
    """Whether a process runs; one that has ended, and is not reaped, does not."""
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


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_rolling_upgrade_under_load_loses_no_value(lab: Lab) -> None:
    """The workers, and then the controller, are restarted in another version while a script trains."""
    assert pw_command("up", lab.file).returncode == 0
    client = lab.folder / "keys" / "client.pem"
    calm = train(client, STEPS)
    newer = lab.folder / "newer" / "openpathways-0.1.99.dist-info"
    newer.mkdir(parents=True)
    (newer / "METADATA").write_text("Metadata-Version: 2.1\nName: openpathways\nVersion: 0.1.99\n")
    described = yaml.safe_load(lab.file.read_text())
    described["environment"]["PYTHONPATH"] = f"{newer.parent}:{ROOT}"
    lab.file.write_text(yaml.safe_dump(described))
    with ThreadPoolExecutor() as pool:
        loaded = pool.submit(train, client, STEPS, lab.folder / "go-on", bound_s=250)
        try:
            until((lab.folder / "trains").exists, "the script trains", 60)
            done = pw_command("up", lab.file, "--restart", bound_s=200)
        finally:
            (lab.folder / "go-on").touch()  # or the pool would wait for a script without an end
        assert done.returncode == 0, done.stdout + done.stderr
        said = loaded.result()
    print(done.stdout, said)
    assert "controller: restarted in" in done.stdout
    assert outcome(said) == outcome(calm)
    assert "pw 0.1.99" in pw_command("doctor", lab.file).stdout


STEPS = 200


def outcome(said: str) -> str:
    """The losses that a training script has printed."""
    return re.findall(r"trained: (loss \S+ -> \S+),", said)[0]
