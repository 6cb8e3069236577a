"""The reference has every public name: a directive shows those that no page of docs/api places.

A page of docs/api places a name by a line such as `.. autofunction:: pw.put`. The directive `{names}` with
the argument `errors` shows all errors of `pw.__all__`, with `others` all names that are left.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import pw

API = Path(__file__).resolve().parents[1] / "api"
_PLACED = re.compile(r"^\.\. (?:auto|py:)\w+:: pw\.(\w+)(?![\w.])", re.M)


def errors() -> list[str]:
    """Return the public errors, the base of all first."""
    return [name for name in pw.__all__ if _is_error(name)]


def others() -> list[str]:
    """Return the public names that are no errors, and that no page places."""
    placed = {name for page in API.glob("*.md") for name in _PLACED.findall(page.read_text())}
    return [name for name in pw.__all__ if not _is_error(name) and name not in placed]


def _is_error(name: str) -> bool:
    found = getattr(pw, name)
    return inspect.isclass(found) and issubclass(found, pw.Error)


def _directive_of(name: str) -> str:
    found: Any = getattr(pw, name)
    if _is_error(name):
        return "autoexception"
    if inspect.ismodule(found):
        return "automodule"
    return (
        "autoclass" if inspect.isclass(found) else "autofunction" if callable(found) else "autodata"
    )


class Names(SphinxDirective):
    """`{names} errors` and `{names} others`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the entries of the names."""
        names = {"errors": errors, "others": others}[self.arguments[0]]()
        if not names:
            return [nodes.paragraph("", "At present there are none.")]
        lines = [line for name in names for line in (f".. {_directive_of(name)}:: pw.{name}", "")]
        text = "\n".join(lines)
        return self.parse_text_to_nodes("```{eval-rst}\n" + text + "```\n")


def setup(app: Sphinx) -> dict[str, bool]:
    """Make the directive known."""
    app.add_directive("names", Names)
    return {"parallel_read_safe": True}
