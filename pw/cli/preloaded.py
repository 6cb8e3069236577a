"""What a server imports of which the daemons of a cluster are forks, so that none of them does.

It reads a command line as well: typer imports pydantic, most of what it needs, when it reads its first.
"""

# ruff: noqa: F401 - for the forks

import typer

import pw.cli.controller
import pw.cli.host
import pw.cli.worker
import pw.devices.host.coordinator
import pw.devices.host.executor
import pw.sched.cluster.manager
import pw.sched.control.controller
import pw.sched.island.scheduler


def _read(text: str = "", fraction: float = 0.0, is_set: bool = False) -> None:
    pass


_program = typer.Typer(add_completion=False)
_program.command()(_read)
_program([], standalone_mode=False)
