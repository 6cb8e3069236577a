"""Training goes on over links with TLS when processes are killed and stopped."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import pw
from pw.core.messages.roles import Role
from pw.transport.access.authority import Authority
from tests.cli.test_survival import BOUND_S, Training, members
from tests.stages.daemons import Program, send, start_module, until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc"),
]

ISLAND = "island-0"


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[Program]]:
    """A controller, and two workers of one island; this process is connected. All have credentials."""
    authority, started = Authority.create(), list[Program]()

    def issue(role: Role, name: str) -> str:
        file = tmp_path / f"{name}.pem"
        file.touch(0o600)
        file.write_bytes(authority.issue(role, name))
        return str(file)

    def start(module: str, keys: str, *arguments: str) -> Program:
        variables = {"PW_CREDENTIALS": keys, "PW_BULK": "tcp"}
        started.append(start_module(module, *arguments, folder=tmp_path, **variables))
        return started[-1]

    try:
        main = start(
            "pw.cli.controller", issue(Role.CONTROLLER, "main"), "--bind", "tcp://127.0.0.1:0"
        )
        main.until_says("listens at")
        address = main.out.split()[-1]
        for name in ("one", "two"):
            start(
                "pw.cli.worker",
                issue(Role.WORKER, name),
                *("--controller", address, "--island", ISLAND, "--island-hosts", "2"),
                *("--name", name, "--log-level", "error"),
            )
        pw.connect(address, credentials=issue(Role.CLIENT, "me"))
        until(members, "the island", 90)
        yield started
    finally:
        pw.disconnect()
        for one in reversed(started):
            one.kill()


@pytest.mark.long
def test_hosts_are_killed_and_stopped(processes: list[Program]) -> None:
    training = Training()
    try:
        # The runtime crashes: its supervisor has another one, with a new link of the same name.
        first = members()
        send(first["one"], signal.SIGKILL)
        until(lambda: members().get("one") not in (None, first["one"]), "another one", BOUND_S)
        training.go_on()

        # The runtime hangs: its links are silent, and its supervisor kills it.
        stuck = members()["two"]
        send(stuck, signal.SIGSTOP)
        until(lambda: stuck not in members().values() and members(), "another two", BOUND_S)
        training.go_on()
        training.stop()
    finally:
        training.give_up()
