"""A long wait of plain JAX shows the line that `pw.Array`s do, in the script's terminal or notebook."""

from __future__ import annotations

import os
import pty
import re
import socket
from pathlib import Path

import pytest

import pw
from pw.gateway import functions
from pw.processes.channel import Channel
from tests.stages.daemons import until
from tests.stages.programs import start

SCRIPT = """
import os, time
import jax, jax.numpy as jnp
from jax.experimental import io_callback

def slow(value):
    while not os.path.exists("SEEN"):
        time.sleep(0.01)
    return value

made = jax.jit(lambda x: io_callback(slow, x, x))(jnp.ones(()))
if True: WAIT
print(float(made), flush=True)
"""
WAITS = {"read": "pass", "block_until_ready": "made.block_until_ready()"}


@pytest.mark.processes
def test_a_terminal_shows_the_line(tmp_path: Path) -> None:
    with pw.LocalCluster(devices_per_host=2, connect=False) as cluster:
        started = {}
        for how, address in (("read", ""), ("block_until_ready", cluster.address or "")):
            ours, theirs = pty.openpty()
            where = {"PW_ADDRESS": address} if address else {"PW_DEVICES": "2"}
            more = {"JAX_PLATFORMS": "pw", "TERM": "xterm", "COLUMNS": "120"} | where
            seen = tmp_path / f"{how} is seen"
            code = SCRIPT.replace("WAIT", WAITS[how]).replace("SEEN", str(seen))
            variables = os.environ | {"PW_PROGRESS": "1"} | more
            with (tmp_path / how).open("w") as out, open(os.devnull) as nothing:
                streams = (nothing.fileno(), out.fileno(), theirs)
                script = start(["-c", code], variables, tmp_path, streams)
            os.close(theirs)
            started[how] = script, ours, seen
        try:
            for how, (script, ours, seen) in started.items():
                terminal = os.read(ours, 1 << 16)
                while b"of 'jit__lambda'" not in terminal:
                    terminal += os.read(ours, 1 << 16)
                seen.touch()
                script.wait(90)
                terminal += os.read(ours, 1 << 16)
                assert (tmp_path / how).read_text() == "1.0\n", terminal
                assert re.search(rb"waiting \d+ s for float32\[\] of 'jit__lambda'", terminal), how
                assert terminal.endswith(b"\r\x1b[2K")
                assert b"\n" not in terminal
        finally:
            for script, ours, _ in started.values():
                script.kill()
                script.wait()
                os.close(ours)


class Shown:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def show(self, line: str, part: float | None = None) -> None:
        self.lines.append(line)

    def clear(self) -> None:
        self.lines.append("")


def test_a_function_that_may_print_has_no_line_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown()
    monkeypatch.setattr(functions, "screen_here", lambda: shown)
    ours, theirs = socket.socketpair()
    called = functions.Functions(Channel(theirs, functions.FromGateway))
    number = called.add(lambda: shown.lines.append("printed") or ())
    with ours:
        gateway = Channel[functions.CallbackAnswer](ours, functions.CallbackAnswer)
        for message in (
            functions.ScriptLine("waiting 3 s"),
            functions.CallbackCall(1, number),
            functions.ScriptLine(""),
        ):
            gateway.send(message)
        assert gateway.receive().message == functions.CallbackAnswer(1)
        until(lambda: len(shown.lines) == 3, "the line, and the function's output")
    assert shown.lines == ["waiting 3 s", "", "printed"]
