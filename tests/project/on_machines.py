"""The program of a test: type the commands of a page on the machines of its prompts, `one` and `two`.

It runs in namespaces of its own (`tests.stages.machines`). Files of the page are saved on the first machine.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from tests.project import blocks
from tests.project.blocks import Command
from tests.stages.forked import MARKER
from tests.stages.machines import USER, Machine, build
from tests.stages.programs import ROOT

ADDRESSES = {"one": "10.0.0.1", "two": "10.0.0.2"}
REPEATED_S = 40.0
"""How long a command is typed again that does not print yet what the page shows."""


def type_on(machine: Machine, command: Command) -> None:
    """Type a command, and compare what it prints with the page. Ends this process if they differ."""
    begun_s = time.monotonic()
    while True:
        code, printed = machine.type(command.line)
        missing = blocks.missing(printed, command.output)
        if missing is None and code == 0:
            break
        if not command.is_repeated or time.monotonic() > begun_s + REPEATED_S:
            reason = f"exit code {code}" if missing is None else f"{missing!r} is missing"
            logs = [
                f"--- {log}\n{log.read_text()}" for log in machine.home.parents[1].glob("*/*/*.log")
            ]
            sys.exit("\n".join([f"{machine.name}$ {command.line}: {reason}", printed, *logs]))
    print(
        f"{machine.name}$ {command.line}  ({time.monotonic() - begun_s:.1f} s)\n{printed}",
        end="",
        flush=True,
    )


def main() -> None:
    page = Path(sys.argv[1])
    build(ADDRESSES)
    kept = ("NPROC", "PJRT_NPROC", "TMPDIR", MARKER)
    variables = {name: os.environ[name] for name in kept if name in os.environ}
    with tempfile.TemporaryDirectory(prefix="pw-") as folder:
        machines = {}
        for name in ADDRESSES:
            home = Path(folder) / name / USER
            home.mkdir(parents=True)
            machines[name] = Machine(name, home, variables | {"PYTHONPATH": str(ROOT)})
        one, two = machines.values()
        for name, text in blocks.files(page).items():
            (one.home / name).write_text(text)
        sshd = two.serve_ssh(one, ADDRESSES["two"])
        try:
            commands = blocks.commands(page)
            for command in commands:
                type_on(machines[command.machine], command)
            print(f"all as on the page: {len(commands)} commands", flush=True)
        finally:
            sshd.terminate()
            sshd.wait(20)
            for machine in machines.values():
                machine.close()


if __name__ == "__main__":
    main()
