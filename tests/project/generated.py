"""The parts of documents that are made from code: the errors, the commands, and the bars of benchmarks.

A part stands in a document between `<!-- made: NAME -->` and `<!-- end -->`.
`python -m tests.project.anchors` writes it anew.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer
import typer.main

import pw
from bench.bars import stored_table
from pw.cli import controller, worker
from pw.cli.main import app
from pw.core.errors import Error, kinds
from pw.core.rights import definitions

_PART = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.S)


def generated(text: str) -> str:
    """Return the text of a document with its parts as the code is now."""
    return _PART.sub(lambda match: f"{match[1]}\n{PARTS[match[2]]()}\n{match[3]}", text)


def errors() -> str:
    """Return a section for each public error, from its docstring."""
    public = {kind: None for kind in kinds() if hasattr(pw, kind.__name__)}
    return "\n".join(_error(kind) for kind in public if kind is not Error)


def _error(kind: type[Error]) -> str:
    parts = re.split(r"\n\n(?:Cause|What to do):\n", inspect.cleandoc(kind.__doc__ or ""))
    if len(parts) != 3:
        raise ValueError(f"the docstring of {kind.__name__} needs `Cause:` and `What to do:`")
    said, cause, remedy = parts
    others = [base.__name__ for base in kind.__bases__ if base is not Error]
    also = f" It is also a `{'` and a `'.join(others)}`." if others else ""
    cause, remedy = (" ".join(part.split()) for part in (cause, remedy))
    return (
        f"### {kind.__name__}\n\n{said}{also}\n\n- **Cause:** {cause}\n- **What to do:** {remedy}\n"
    )


@functools.cache
def programs() -> dict[str, Any]:
    """Return the commands that users start, by name."""
    commands: dict[str, Any] = {"pw": typer.main.get_command(app)}
    for name, function in (("pw-controller", controller.serve), ("pw-worker", worker.serve)):
        alone = typer.Typer(add_completion=False)
        alone.command()(function)
        commands[name] = typer.main.get_command(alone)
    return commands


def _leaves(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Each command that is no group of others, with all its words."""
    group = getattr(command, "commands", {})
    if not group:
        yield name, command
    for part, one in group.items():
        yield from _leaves(f"{name} {part}", one)


def commands() -> str:
    """Return a section for each command, from what `--help` shows."""
    found = [leaf for name, command in programs().items() for leaf in _leaves(name, command)]
    return "\n".join(_command(name, command) for name, command in found if not command.hidden)


def _command(name: str, command: Any) -> str:
    words = inspect.cleandoc(command.help or "").replace("\f", "")
    rows = [_row(parameter) for parameter in command.params if not parameter.hidden]
    table = "| argument or option | default | meaning |\n|---|---|---|\n" + "".join(rows)
    return f"## {name}\n\n{words}\n" + (f"\n{table}" if rows else "")


def _row(parameter: Any) -> str:
    names = parameter.opts + parameter.secondary_opts
    shown = ", ".join(f"`{name if name.startswith('-') else name.upper()}`" for name in names)
    default = parameter.default
    default = getattr(default, "value", default)
    value = (
        "required" if parameter.required else "" if default in ("", None, ()) else f"`{default}`"
    )
    variable = f" Variable `{parameter.envvar}`." if parameter.envvar else ""
    meaning = " ".join((parameter.help or "").split()).replace("|", "\\|")
    return f"| {shown} | {value} | {meaning}{variable} |\n"


def rights() -> str:
    """Return the table of the rights of tenants."""
    rows = [
        (f"`{one.name}`", one.form, one.unit, _default(one.default), one.meaning)
        for one in definitions()
    ]
    head = "| right | value | unit | default | what it bounds |\n|---|---|---|---|---|\n"
    return head + "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _default(value: object) -> str:
    return (
        "no bound"
        if value is None
        else str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
    )


PARTS = {"bars": stored_table, "errors": errors, "commands": commands, "rights": rights}
